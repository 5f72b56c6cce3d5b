"""Fixtures for every test of the repository: small checkpoints as a user would find them, and the demo model."""

import os
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import HealthCheck, settings

TINY_SHAPES = {"llama": "tiny-llama", "qwen3": "tiny-qwen3", "gemma3_text": "tiny-gemma3"}
FAMILIES = tuple(TINY_SHAPES)
OWN_FOLDERS = tuple(folder for folder in os.environ.get("INFER_TEST_MODELS", "").split(",") if folder)

# Tiny tensors gain nothing from a second thread and lose much where other processes want the cores too. Tests that
# measure time choose their own count.
torch.set_num_threads(1)

# How long an example takes says nothing here: the machine has other work, and a first call compiles.
settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")


# Commands choose a GPU where there is one; what tests compare them with is computed on the CPU.
os.environ.setdefault("INFER_DEVICE", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workshop", action="store_true", help="run the code in workspace/ in the reference's place")
    parser.addoption("--fix", action="store_true", help="write what the chapters in tutorial/ quote and show anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--workshop"):
        os.environ["INFER_WORKSHOP"] = "1"
        os.environ.setdefault("INFER_WORKSHOP_GAPS", "raise")
    from shared.cli import app  # with the variable set, this puts the workspace's modules over the reference's
    from tutorial.checker.references import INFER

    config.stash[INFER] = typer.main.get_command(app)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_speedup.py":
            item.add_marker("measured")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and this machine has none")


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each family, by family."""
    from shared.checkpoints.make import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(shape, root / shape, seed=1) for family, shape in TINY_SHAPES.items()}


@pytest.fixture(scope="session")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    """A random checkpoint for whom any family will do."""
    return tiny_checkpoints["llama"]


@pytest.fixture(scope="session", params=(*FAMILIES, *OWN_FOLDERS))
def model_folder(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> Path:
    """Each family's random checkpoint in turn, then the real folders that INFER_TEST_MODELS names."""
    return tiny_checkpoints.get(request.param) or Path(request.param)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder; skips where it has not been fetched."""
    from shared.checkpoints.demo import local_model_folder

    folder = local_model_folder("smollm2-135m")
    if folder is None:
        pytest.skip("the demo model is not fetched; run `infer model pull smollm2-135m` once")
    return folder
