"""The contract of a phase folder (docs/OVERALL_DESIGN.md), kept for every phase that exists."""

import ast
import difflib
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.engine.config import SIDE_TRACKS, EngineConfig
from shared.engine.sampling.rejection import Rejection
from shared.errors import ConfigError, RequestError
from shared.lesson_source import methods
from shared.lessons import Lesson, lessons
from shared.sampling.params import LATER, SamplingParams, StructuredOutput
from shared.scheduling.static import StaticScheduler
from shared.speculation.draft_costs import TableCosts
from tests.speed import one_answer

FILES = {"__init__.py", "__main__.py", "engine.py", "lesson.toml", "test_parity.py", "test_speedup.py"}
LESSONS = lessons()
GENERATING = [lesson for lesson in LESSONS if lesson.number >= "02"]
PAIRS = [(old, new) for new in LESSONS for old in LESSONS if old.number == new.previous]
ARRIVING = [  # settings with values that are not their defaults, and the phase that brings each
    ("attention_backend", "flash", "03.1"),
    ("max_batch_size", 4, "04"),
    ("batching_mode", "continuous", "05"),
    ("scheduler_policy", "prefill_first", "05"),
    ("kv_cache_backend", "paged", "06"),
    ("block_size", 8, "06"),
    ("attention_backend", "planned", "06.1"),
    ("prefill_chunk_size", 64, "07"),
    ("use_prefix_caching", True, "08"),
    ("overlap_scheduling", True, "09"),
    ("quantization", "int4", "10"),
    ("tensor_parallel_size", 2, "12.1"),
]
GENERATING_PAIRS = [(old, new) for old, new in PAIRS if old.number >= "02"]


def by_number(lesson: Lesson) -> str:
    return lesson.number


def pair_ids(pair: object) -> str:
    return pair.number if isinstance(pair, Lesson) else str(pair)


IMPORT_EACH = """
import importlib, os, sys
for library in ("torch", "triton", "rich.progress", "safetensors.torch", "psutil"):
    try:
        importlib.import_module(library)
    except ImportError:
        pass  # Triton may be absent
for name in sys.argv[1:]:
    if os.fork() == 0:
        __import__(name)
        print(*(module for module in sys.modules if module.startswith("shared.")), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


@cache
def loaded_modules() -> dict[str, frozenset[str]]:
    """By phase: the shared modules that an interpreter holds once it has imported the phase's engine and no other.

    One process imports libraries, which is most of the time, and forks for each engine.
    """
    command = [sys.executable, "-c", IMPORT_EACH, *(f"{lesson.module_name}.engine" for lesson in LESSONS)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    found = (frozenset(line.split()) for line in done.stdout.splitlines())
    return {lesson.number: modules for lesson, modules in zip(LESSONS, found, strict=True)}


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_a_phase_folder_holds_the_same_files(lesson: Lesson) -> None:
    found = {path.name for path in lesson.folder.iterdir() if path.is_file()}
    optional = {"test_speedup.py"} if lesson.number < "02" else set()
    assert FILES - optional <= found
    assert found <= FILES
    assert lesson.load("engine").__doc__
    first = (LESSONS[0].folder / "__main__.py").read_text(encoding="utf-8")
    assert (lesson.folder / "__main__.py").read_text(encoding="utf-8") == first


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_an_engine_is_short_imports_no_phase_and_knows_no_number(lesson: Lesson) -> None:
    source = (lesson.folder / "engine.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    tree = ast.parse(source)
    imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in imported if name.split(".")[0] in ("phases", "tests", "benchmarks", "tutorial")]
    (engine,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Engine"]
    assert list(map(ast.unparse, engine.bases)) == ([] if lesson.number < "04" else ["ServingEngine"])
    assert lesson.number < "04" or next(iter(methods(lesson))) == "step", "a reader wants to see the step first"
    constants = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    code_strings = [text for text in constants if "\n" not in text and " " not in text]
    assert lesson.number not in code_strings


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_a_phase_without_generation_offers_forward(lesson: Lesson) -> None:
    wanted = "generate" if lesson.number >= "02" else "forward"
    assert hasattr(lesson.load("engine").Engine, wanted)


@pytest.mark.parametrize(("old", "new"), GENERATING_PAIRS, ids=pair_ids)
def test_methods_keep_name_and_order_until_a_phase_removes_them(old: Lesson, new: Lesson) -> None:
    before, after = ([*methods(lesson)] for lesson in (old, new))
    gone = {name for name in before if not hasattr(new.load("engine").Engine, name)}
    assert {*new.removes} == gone, "it removes what it still has, or what was not there"
    assert [name for name in after if name in before] == [name for name in before if name in after]


def test_a_side_track_branches_off_and_nothing_follows_it() -> None:
    numbers = {lesson.number: lesson for lesson in LESSONS}
    for lesson in LESSONS:
        if lesson.previous is not None:
            assert lesson.previous < lesson.number
            assert not numbers[lesson.previous].is_side_track, f"phase {lesson.number} follows a side track"
        assert lesson.is_side_track == (lesson.number in SIDE_TRACKS)


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=pair_ids)
def test_changes_names_exactly_the_methods_that_differ(old: Lesson, new: Lesson) -> None:
    before, after = methods(old), methods(new)
    differ = [name for name in after if after[name] != before.get(name)]
    diff = "\n".join(
        line
        for name in set(differ) ^ set(new.changes)
        for line in difflib.unified_diff(
            before.get(name, "").splitlines(), after.get(name, "").splitlines(), lineterm=""
        )
    )
    assert list(new.changes) == differ, f"`changes` of phase {new.number} is not what differs:\n{diff}"


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_adds_equals_the_modules_that_the_engine_loads_first(lesson: Lesson) -> None:
    before = loaded_modules()[lesson.previous] if lesson.previous else frozenset()
    assert sorted(lesson.adds) == sorted(loaded_modules()[lesson.number] - before)
    for name in lesson.adds:
        path = Path(__file__).parents[2].joinpath(*name.split("."))
        if not path.is_dir():
            docstring = ast.get_docstring(ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))) or ""
            introduced = f"phase {lesson.number.lstrip('0')}"
            assert introduced in " ".join(docstring.split()), f"the docstring of {name} does not name {introduced}"


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=pair_ids)
def test_a_replaced_part_is_one_of_the_phase_before(old: Lesson, new: Lesson) -> None:
    for before, after in new.replaces:
        assert before in loaded_modules()[old.number]
        assert after in new.adds


@pytest.mark.parametrize("lesson", GENERATING, ids=by_number)
def test_an_engine_refuses_settings_of_later_phases(lesson: Lesson) -> None:
    supported = lesson.load("engine").SUPPORTED
    fields = EngineConfig.__dataclass_fields__
    for entry in supported:
        name, _, value = entry.partition("=")
        arrives = fields[name].metadata["values"][value] if value else fields[name].metadata["phase"]
        assert arrives <= lesson.number, entry
    config = EngineConfig(attention_backend="naive")
    with pytest.raises(ConfigError, match=r"attention_backend = 'naive' arrives in phase 02"):
        config.check(supported - {"attention_backend"})
    config.check(supported)
    engine = lesson.load("engine").Engine
    arriving = [(f.name, value, phase) for f in fields.values() for value, phase in f.metadata["values"].items()]
    for name, value, phase in [*arriving, *ARRIVING]:
        if phase > lesson.number:
            with pytest.raises(ConfigError, match=f"{name} = {value!r} arrives in phase {phase}; leave it"):
                engine(EngineConfig(**{name: value}))


@pytest.mark.parametrize("lesson", GENERATING, ids=by_number)
def test_an_engine_refuses_parameters_of_later_phases(lesson: Lesson, folder: Path) -> None:
    values = {
        "prompt_logprobs": 1,
        "thinking_budget": 5,
        "min_thinking_tokens": 5,
        "structured_output": StructuredOutput(),
    }
    assert values.keys() == LATER.keys()
    engine = lesson.load("engine").Engine(EngineConfig(str(folder), max_seq_len=64))
    for field, phase in LATER.items():
        if phase > lesson.number or (phase in SIDE_TRACKS and phase != lesson.number):
            with pytest.raises(RequestError, match=f"^{field} is .* left out: .* the engine of phase {phase} does"):
                next(engine.generate([1], SamplingParams(**{field: values[field]})))
            assert lesson.number < "04" or not engine.has_work()


@pytest.mark.parametrize("lesson", GENERATING, ids=by_number)
def test_an_engine_computes_each_token_once_or_finds_it_in_a_cache(lesson: Lesson, folder: Path) -> None:
    """16 tokens after a prompt of 32, twice. Phase 2 computes every prefix, and phase 8 finds the prompt, if it may."""
    for caches in (None, False)[: 1 + (lesson.number >= "08")]:
        engine = lesson.load("engine").Engine(EngineConfig(model=str(folder), use_prefix_caching=caches))
        computed = []
        for _ in range(2):
            before = engine.stats()["tokens computed"]
            one_answer(engine)
            computed.append(engine.stats()["tokens computed"] - before)
        of_the_prompt = 1 if lesson.number >= "08" and caches is None else 32
        assert computed == ([sum(range(32, 48))] * 2 if lesson.number == "02" else [32 + 15, of_the_prompt + 15])


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson.number >= "09"], ids=by_number)
def test_a_step_in_flight_is_finished_by_the_next_or_dropped_with_it(
    lesson: Lesson, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``overlap_scheduling`` a step is finished when it returns."""
    answers = []
    for overlaps, is_broken in ((None, False), (False, False), (True, False), (True, True)):
        options: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 2, "overlap_scheduling": overlaps}
        engine, seeds = lesson.engine(EngineConfig(model=str(folder), seed=7, **options)), random.Random(7)
        engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True))
        outputs = engine.step()
        assert (engine.in_flight is not None) == bool(overlaps)
        if is_broken:
            with monkeypatch.context() as patch:
                patch.setattr(engine.scheduler, "schedule", raise_injected)
                with pytest.raises(RuntimeError, match="injected"):
                    engine.step()
            assert engine.in_flight is None
        while engine.has_work():
            outputs += engine.step()
        answers.append([output.token_id for output in outputs])
        unseeded = engine.scheduler.abort(engine.add_request([1], SamplingParams()))
        assert unseeded.seed == [seeds.getrandbits(64) for _ in range(2)][1], "a request takes one seed of its engine's"
    assert len(answers[0]) == 6
    assert answers == answers[:1] * 4


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson.number >= "11"], ids=by_number)
def test_a_step_with_drafts_is_finished_when_it_returns_and_the_drafter_sees_every_step(
    lesson: Lesson, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "use_speculative_decoding": True, "drafter": "ngram"}
    options |= {"adapt_spec_length": False, "overlap_scheduling": True}
    engine, planned, seen = lesson.engine(EngineConfig(model=str(folder), **options)), list[Any](), list[Any]()
    observe = engine.drafter.observe

    def propose(schedule: Any) -> None:
        for entry in schedule:
            entry.request.draft_ids = [1] * entry.num_drafts
        planned.append(schedule)

    monkeypatch.setattr(engine.drafter, "propose", propose)
    monkeypatch.setattr(engine.drafter, "observe", lambda schedule: seen.append(schedule.step) or observe(schedule))
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True))
    while engine.has_work():
        engine.step()
        assert (engine.in_flight is not None) == (bool(planned[-1]) and not planned[-1].has_drafts)
    assert any(schedule.has_drafts for schedule in planned)
    assert seen == [schedule.step for schedule in planned if schedule]


def raise_injected() -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("lesson", [lesson for lesson in LESSONS if lesson.number >= "07"], ids=by_number)
def test_settings_choose_the_parts(lesson: Lesson, folder: Path) -> None:
    options: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 2}
    for contiguous in ({}, {"kv_cache_backend": "contiguous"}):
        for static in ({}, {"batching_mode": "static"}):
            engine = lesson.engine(EngineConfig(model=str(folder), **options, **contiguous, **static))
            assert isinstance(engine.pool, ContiguousKVCachePool) == bool(contiguous)
            assert isinstance(engine.scheduler, StaticScheduler) == bool(static)
    if lesson.number >= "11":
        options |= {"use_speculative_decoding": True, "drafter": "ngram"}
        for method in ("coupled", "rejection"):
            engine = lesson.engine(EngineConfig(model=str(folder), **options, acceptance_method=method))
            assert isinstance(engine.runner.sampler.draw, Rejection) == (method == "rejection")
            assert isinstance(engine.scheduler.lengths.costs_of, TableCosts)
