"""Every exercise proved: with a gap its tests fail by the gap, with the reference's lines they pass, and no earlier
phase notices. Each proof is a run of pytest of its own, as ``infer workshop check`` makes it; two run at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.lessons import Lesson, lessons
from tutorial.workshop.check import Outcome, run_pytest, run_tests
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of
from tutorial.workshop.skeleton import filled
from tutorial.workshop.workspace import Workspace

EXERCISES = exercises()
LESSONS = lessons()
Proofs = dict[str, Future[Any]]
PAIRS = [(old, new) for new in LESSONS for old in LESSONS if old.number == new.previous]


def by_number(value: Exercise | Lesson) -> str:
    return value.number


@pytest.fixture(scope="module")
def proofs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """The runs of this module's chosen tests, by test id: begun before they are asked for, in the tests' order."""
    with ThreadPoolExecutor(2) as pool:
        begun: Proofs = {}
        for item in request.session.items:
            runs = RUNS.get(getattr(item, "originalname", ""))
            if item.path == request.path and runs is not None:
                begun[item.nodeid] = pool.submit(runs, tmp_path_factory.mktemp("workspace"), **item.callspec.params)
        yield begun
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def proof(request: pytest.FixtureRequest, proofs: Proofs) -> Any:
    """What the run of this test found."""
    return proofs[request.node.nodeid].result()


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_a_phase_has_two_to_five_exercises_from_ten_minutes_to_an_hour(lesson: Lesson) -> None:
    found = exercises_of(lesson)
    assert 2 <= len(found) <= 5
    assert all(10 <= exercise.minutes <= 60 for exercise in found)


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_no_earlier_phase_loads_a_module_with_a_phase_s_exercises(lesson: Lesson) -> None:
    """Each phase's ``adds`` is what its engine loads first (test_phase_contract proves it in a fresh interpreter)."""
    modules = {exercise.module for exercise in exercises_of(lesson)}
    assert modules <= set(lesson.adds)
    way, numbers = lesson, []
    while way.previous is not None:
        way = next(other for other in LESSONS if other.number == way.previous)
        numbers.append(way.number)
        assert not modules & set(way.adds)


def run_with_a_gap(workspace: Path, exercise: Exercise) -> Any:
    Workspace(workspace).start([exercise])
    return run_tests(workspace, [exercise], gaps_raise=True)


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_number)
def test_with_a_gap_every_mapped_test_fails_by_it(exercise: Exercise, proof: Any) -> None:
    (verdict,) = proof.verdicts
    assert verdict.outcome is Outcome.FAILED, proof.output
    assert verdict.num_tests >= len(exercise.tests)
    assert verdict.num_passed == 0, f"tests that do not notice the gap:\n{proof.output}"
    assert set(proof.errors.values()) == {f"NotImplementedError: {exercise.message}"}, proof.output
    for test in exercise.tests:
        assert any(name == test or name.startswith(f"{test}[") for name in proof.errors), f"{test} did not run"


def run_filled(workspace: Path, lesson: Lesson) -> Any:
    wanted = exercises_of(lesson)
    for file in Workspace(workspace).start(wanted):
        text, numbers = filled(file.read_text(), (ROOT / file.relative_to(workspace)).read_text())
        assert numbers
        file.write_text(text)
    return workspace, run_tests(workspace, wanted, gaps_raise=True)


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_with_the_reference_s_lines_every_mapped_test_passes(lesson: Lesson, proof: Any) -> None:
    workspace, run = proof
    assert tuple(verdict.exercise for verdict in run.verdicts) == exercises_of(lesson)
    for verdict in run.verdicts:
        assert verdict.outcome is Outcome.PASSED, run.output
        assert verdict.file == str(workspace / verdict.exercise.path)
        assert verdict.num_passed == verdict.num_tests >= 1


def run_the_phase_before(workspace: Path, old: Lesson, new: Lesson) -> tuple[int, str]:
    Workspace(workspace).start(exercises_of(new))
    # Long comparisons against transformers, and checks of the tests themselves, say nothing more about imports.
    options = ["-m", "not demo and not gpu", "-k", "not transformers and not mutation and not half and not bf16"]
    tests = [str(old.folder.relative_to(ROOT)), *options]
    return run_pytest(workspace, tests, gaps_raise=True, seconds=300)


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda lesson: lesson.number)
def test_the_phase_before_passes_with_all_gaps_of_a_phase(old: Lesson, new: Lesson, proof: tuple[int, str]) -> None:
    code, output = proof
    assert code == 0, output


RUNS: dict[str, Callable[..., Any]] = {
    test_with_a_gap_every_mapped_test_fails_by_it.__name__: run_with_a_gap,
    test_with_the_reference_s_lines_every_mapped_test_passes.__name__: run_filled,
    test_the_phase_before_passes_with_all_gaps_of_a_phase.__name__: run_the_phase_before,
}
