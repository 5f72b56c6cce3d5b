"""Fixtures for every test of the repository: small checkpoints as a user would find them, the demo model, and the
tokens of transformers that answers are compared with."""

import gc
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from filelock import FileLock
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.reference_tokens import ReferenceTokens

# Imported modules and test items live until the end. Freeze them, so that garbage collection visits only what tests
# allocate.
gc.disable()

TINY_SHAPES = {"llama": "tiny-llama", "qwen3": "tiny-qwen3", "gemma3_text": "tiny-gemma3"}
FEWER_LAYERS = {"gemma3_text": {"num_hidden_layers": 4, "sliding_window_pattern": 3}}  # still of both kinds
FAMILIES = tuple(TINY_SHAPES)
OWN_FOLDERS = tuple(folder for folder in os.environ.get("INFER_TEST_MODELS", "").split(",") if folder)
TOKENIZER_FOLDERS = (*OWN_FOLDERS, *filter(None, os.environ.get("INFER_TEST_TOKENIZERS", "").split(",")))

# Tiny tensors gain nothing from a second thread and lose much where other processes want the cores too. Tests that
# measure time choose their own count.
torch.set_num_threads(1)
# A fork makes PyTorch's pool of threads anew at its first use, and fails where two threads are the first at once.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

# The suite says the same of a commit every time: each test finds the same examples. How long one takes says nothing, as
# the machine has other work and a first call compiles. Both checks are named here because a test that names one of its
# own would have the other again.
settings.register_profile(
    "repository",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# A check of an exercise finds its example soon, and by it a known mistake is recognised.
settings.register_profile(
    "workshop",
    settings.get_profile("repository"),
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
# ``make fuzz`` looks for new examples. Those that fail are kept in .hypothesis and tried first the next time.
settings.register_profile(
    "fuzz",
    settings.get_profile("repository"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    print_blob=True,
)
FUZZ_UNTIL = float(os.environ.get("INFER_FUZZ_UNTIL", 0))  # seconds since the epoch; 0: the same examples as always
IS_WORKSHOP = os.environ.get("INFER_WORKSHOP", "0") not in ("", "0")
settings.load_profile("workshop" if IS_WORKSHOP else "fuzz" if FUZZ_UNTIL else "repository")


# No server of checks stays when the tests have ended.
os.environ["INFER_WORKSHOP_IDLE"] = "0"
# Commands choose a GPU where there is one; what tests compare them with is computed on the CPU.
os.environ.setdefault("INFER_DEVICE", "cpu")
# Lengths of drafts follow the costs derived from a model's shape, whatever was measured on this machine.
os.environ["INFER_STEP_COSTS"] = os.devnull


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workshop", action="store_true", help="run the code in workspace/ in the reference's place")
    parser.addoption("--fix", action="store_true", help="write what the chapters in tutorial/ quote and show anew")
    parser.addoption(
        "--from-empty", metavar="FILE", help="run a phase's parity tests on the class Engine of your own file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--workshop"):
        os.environ["INFER_WORKSHOP"] = "1"
        os.environ.setdefault("INFER_WORKSHOP_GAPS", "raise")
    from shared.cli import app  # with the variable set, this puts the workspace's modules over the reference's
    from tutorial.checker.references import INFER

    config.stash[INFER] = cache(lambda: typer.main.get_command(app))
    if config.getoption("from_empty"):  # a learner wants the message, and what their own code printed
        config.option.tbstyle = "short" if config.option.tbstyle == "auto" else config.option.tbstyle
        config.option.showcapture = "stdout"
        from tutorial.workshop.from_empty_mistakes import diagnose

        diagnose(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    if config.getoption("from_empty"):
        run_on_own_engine(config, items)
    if not torch.cuda.is_available():
        keep_one_skip_a_function(config, items)


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test in which the forward of several requests raised: each is computed again by itself, so their answers
    do not tell.
    """
    messages, logger = Messages(), logging.getLogger("infer.engine")
    logger.addHandler(messages)
    try:
        yield
    finally:
        logger.removeHandler(messages)
    raised = [message for message in messages.kept if message.startswith("A forward of")]
    if raised and item.get_closest_marker("failing_forwards") is None:
        pytest.fail(f"{raised[0]} A test that makes forwards raise is marked failing_forwards.", pytrace=False)


def run_on_own_engine(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that a learner's file is meant for, running its class Engine."""
    from tutorial.workshop.from_empty import load_engine, select

    chosen, others = select(items, load_engine(config.invocation_params.dir / config.getoption("from_empty")))
    if not chosen:
        raise pytest.UsageError("no test here is meant for --from-empty; name phases/phase_01a, 01b, 02 or 03.")
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def keep_one_skip_a_function(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test function's parameters that need a GPU, leave one to say why it is skipped."""
    kept, dropped, said = [], [], set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        is_repeated = item.get_closest_marker("gpu") is not None and function in said
        (dropped if is_repeated else kept).append(item)
        if item.get_closest_marker("gpu"):
            said.add(function)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.set_threshold(5_000)  # seven times as rarely as by default, which took a twentieth of the suite's time
    gc.enable()  # here, as xdist's controller collects no tests


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")
    if FUZZ_UNTIL and time.time() > FUZZ_UNTIL:
        pytest.skip("the minutes of `make fuzz` are over")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a seed of its own does not depend on the tests that ran before it."""
    random.seed(0)
    np.random.seed(0)
    # For devices that are not there, `torch.manual_seed` writes down the whole stack.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(scope="session")
def session_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run alone, which all of its worker processes share, and the checks of exercises that it runs."""
    if (shared := os.environ.get("INFER_SESSION_FOLDER")) and not request.config.getoption("from_empty"):
        return Path(shared)
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def tiny_checkpoints(session_folder: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """A random checkpoint of each family, by family; for a file from empty, Llama's without scaled RoPE."""
    folders = {family: session_folder / "checkpoints" / shape for family, shape in TINY_SHAPES.items()}
    with FileLock(session_folder / "checkpoints.lock"), pytest.MonkeyPatch.context() as patch:
        for shape in (folder for folder in folders.values() if not folder.exists()):
            from shared.checkpoints import make

            fewer = {TINY_SHAPES[family]: make.SHAPES[TINY_SHAPES[family]] | f for family, f in FEWER_LAYERS.items()}
            patch.setattr(make, "SHAPES", make.SHAPES | fewer)
            make.make_checkpoint(shape.name, shape, seed=1)
        if request.config.getoption("from_empty"):
            config = json.loads((folders["llama"] / "config.json").read_text())
            (folders["llama"] / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    return folders


@pytest.fixture
def reference_tokens(session_folder: Path) -> ReferenceTokens:
    """``reference_tokens(folder, prompt_ids, n)``: the greedy tokens of transformers; their model is freed."""
    answers = session_folder / "reference_tokens"
    answers.mkdir(exist_ok=True)
    return ReferenceTokens(answers)


@pytest.fixture(scope="session")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    """A random checkpoint for whom any family will do."""
    return tiny_checkpoints["llama"]


@pytest.fixture(scope="session", params=(*FAMILIES, *OWN_FOLDERS))
def model_folder(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> Path:
    """Each family's random checkpoint in turn, then the real folders that INFER_TEST_MODELS names."""
    return tiny_checkpoints.get(request.param) or Path(request.param)


@pytest.fixture(params=TOKENIZER_FOLDERS or [None], ids=lambda folder: folder and Path(folder).name)
def tokenizer_folder(request: pytest.FixtureRequest) -> Path:
    """Each folder of INFER_TEST_MODELS, and of INFER_TEST_TOKENIZERS, whose folders may lack weights."""
    if request.param is None:
        pytest.skip("set INFER_TEST_TOKENIZERS=dir,... to folders with tokenizer files and config.json")
    return Path(request.param)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder; skips where it has not been fetched."""
    from shared.checkpoints.demo import local_model_folder

    folder = local_model_folder("smollm2-135m")
    if folder is None:
        pytest.skip("the demo model is not fetched; run `infer model pull smollm2-135m` once")
    return folder
