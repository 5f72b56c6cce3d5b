"""Every exercise proved: with a gap its tests fail by the gap, with the reference's lines they pass, and no earlier
phase notices. Each proof is a run of pytest of its own, as ``infer workshop check`` makes it."""

import ast
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.kernels import NO_TRITON
from shared.lessons import Lesson, lessons
from tutorial.workshop.check import CheckServer, Run, can_be_checked
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of
from tutorial.workshop.skeleton import filled
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.workspace import Workspace

pytestmark = pytest.mark.slow

EXERCISES = exercises()
LESSONS = lessons()
AT_ONCE = 2


def by_number(value: Exercise | Lesson) -> str:
    return value.number


def checked(each: Exercise | Lesson) -> tuple[Exercise, ...]:
    """The exercise, or those of the phase, without any that cannot be checked on this machine."""
    return tuple(filter(can_be_checked, [each] if isinstance(each, Exercise) else exercises_of(each)))


class Proofs:
    """Runs of pytest on workspaces, each made once, the next ones ahead of the test that asks for them."""

    def __init__(self, server: CheckServer, root: Path) -> None:
        self.server = server
        self.root = root
        self.order = [each for each in (*EXERCISES, *LESSONS) if checked(each)]
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.runs: dict[Exercise | Lesson, Future[Run]] = {}

    def of(self, wanted: Exercise | Lesson) -> tuple[Path, Run]:
        """The workspace and the run: of an exercise with its gap, or of a phase with the reference's lines."""
        if not checked(wanted):
            pytest.skip(f"{NO_TRITON}")
        place = self.order.index(wanted)
        for each in self.order[place : place + AT_ONCE + 1]:
            if each not in self.runs:
                # Prepared here: CPython 3.11 may raise SystemError where two threads parse source code at once.
                workspace, proved = self._prepare(each)
                self.runs[each] = self.pool.submit(self.server.run, workspace, proved, gaps_raise=True)
        return self.root / wanted.number, self.runs[wanted].result()

    def _prepare(self, each: Exercise | Lesson) -> tuple[Path, tuple[Exercise, ...]]:
        workspace = self.root / each.number
        wanted = checked(each)
        files = Workspace(workspace).start(wanted)
        if isinstance(each, Lesson):
            for file in files:
                text, numbers = filled(file.read_text(), (ROOT / file.relative_to(workspace)).read_text())
                assert numbers
                file.write_text(text)
        return workspace, wanted


@pytest.fixture(scope="module")
def proofs(check_server: CheckServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proofs]:
    made = Proofs(check_server, tmp_path_factory.mktemp("proofs"))
    yield made
    made.pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_a_phase_has_two_to_five_exercises_from_ten_minutes_to_an_hour(lesson: Lesson) -> None:
    found = exercises_of(lesson)
    assert 2 <= len(found) <= 5
    assert all(10 <= exercise.minutes <= 60 for exercise in found)


def imported(source: Path) -> set[Path]:
    """The files of `shared` that a file imports anywhere in its text, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [ROOT / name.replace(".", "/") for name in names if name.startswith("shared")]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return {file for file in files if file.is_file()}


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_no_earlier_phase_can_load_a_module_with_a_phase_s_exercises(lesson: Lesson) -> None:
    """So that an earlier phase runs whatever a learner has written, there is no need to run it with gaps: neither its
    engine nor what that imports names such a module, not even inside a function that is rarely called. That a module of
    ``adds`` is first loaded by its phase's engine, `test_phase_contract` proves in fresh interpreters."""
    wanted = exercises_of(lesson)
    assert {exercise.module for exercise in wanted} <= {*lesson.adds, *lesson.beside}
    way = lesson
    while way.previous is not None:
        way = next(other for other in LESSONS if other.number == way.previous)
        found: set[Path] = set()
        left = [way.folder / "engine.py"]
        while left:
            new = imported(left.pop()) - found
            found |= new
            left += new
        assert len(found) > 10
        assert not found & {ROOT / exercise.path for exercise in wanted}


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_number)
def test_with_a_gap_every_mapped_test_fails_by_it(exercise: Exercise, proofs: Proofs) -> None:
    _, proof = proofs.of(exercise)
    (verdict,) = proof.verdicts
    assert verdict.outcome is Outcome.FAILED, proof.output
    assert verdict.num_tests >= len(exercise.tests)
    assert verdict.num_passed == 0, f"tests that do not notice the gap:\n{proof.output}"
    assert set(proof.errors.values()) == {f"NotImplementedError: {exercise.message}"}, proof.output
    for test in exercise.tests:
        assert any(name == test or name.startswith(f"{test}[") for name in proof.errors), f"{test} did not run"


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_with_the_reference_s_lines_every_mapped_test_passes(lesson: Lesson, proofs: Proofs) -> None:
    workspace, run = proofs.of(lesson)
    assert tuple(verdict.exercise for verdict in run.verdicts) == checked(lesson)
    for verdict in run.verdicts:
        assert verdict.outcome is Outcome.PASSED, run.output
        assert verdict.file == str(workspace / verdict.exercise.path)
        assert verdict.num_passed == verdict.num_tests >= 1
