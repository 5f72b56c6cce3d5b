"""Every exercise proved: with a gap its tests fail by the gap, with the reference's lines they pass, and no earlier
phase notices. All gaps share one run of pytest, as known mistakes do; the reference's lines run in a workspace, as
``infer workshop check`` runs a learner's."""

import ast
from functools import cache
from pathlib import Path

import pytest

from shared.kernels import NO_TRITON
from shared.lessons import Lesson, lessons
from tutorial.workshop.check import CheckServer, Run, can_be_checked
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of, reference
from tutorial.workshop.skeleton import filled, skeleton
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.version_runs import run_versions
from tutorial.workshop.workspace import Workspace

pytestmark = pytest.mark.slow

EXERCISES = exercises()
LESSONS = lessons()


def by_number(value: Exercise | Lesson) -> str:
    return value.number


@pytest.fixture(scope="module")
def gaps(request: pytest.FixtureRequest, check_server: CheckServer) -> dict[Exercise, Run]:
    """By collected exercise, what its tests say of a module with its gap alone."""
    here = [item for item in request.session.items if item.path == request.path and "gaps" in item.fixturenames]
    wanted = [each for each in (item.callspec.params["exercise"] for item in here) if can_be_checked(each)]
    texts = [skeleton(reference(exercise)[0], {exercise.number}) for exercise in wanted]
    return dict(zip(wanted, run_versions(check_server, list(zip(wanted, texts, strict=True))), strict=True))


@pytest.fixture(scope="module")
def solved(check_server: CheckServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A workspace that holds every exercise with its gap filled by the reference's lines, and what all tests say."""
    root, wanted = tmp_path_factory.mktemp("solved"), tuple(filter(can_be_checked, EXERCISES))
    for file in Workspace(root).start(wanted):
        text, numbers = filled(file.read_text(), (ROOT / file.relative_to(root)).read_text())
        assert numbers
        file.write_text(text)
    return root, check_server.run(root, wanted, gaps_raise=True)


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_a_phase_has_two_to_five_exercises_from_ten_minutes_to_an_hour(lesson: Lesson) -> None:
    found = exercises_of(lesson)
    assert 2 <= len(found) <= 5
    assert all(10 <= exercise.minutes <= 60 for exercise in found)


@cache
def imported(source: Path) -> frozenset[Path]:
    """The files of `shared` that a file imports anywhere in its text, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [ROOT / name.replace(".", "/") for name in names if name.startswith("shared")]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return frozenset(file for file in files if file.is_file())


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
def test_with_a_gap_every_mapped_test_fails_by_it(exercise: Exercise, gaps: dict[Exercise, Run]) -> None:
    if not can_be_checked(exercise):
        pytest.skip(f"{NO_TRITON}")
    proof = gaps[exercise]
    (verdict,) = proof.verdicts
    assert verdict.outcome is Outcome.FAILED, proof.output
    assert verdict.num_tests >= len(exercise.tests)
    assert verdict.num_passed == 0, f"tests that do not notice the gap:\n{proof.output}"
    assert set(proof.errors.values()) == {f"NotImplementedError: {exercise.message}"}, proof.output
    for test in exercise.tests:
        assert any(name == test or name.startswith(f"{test}[") for name in proof.errors), f"{test} did not run"


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_number)
def test_with_the_reference_s_lines_every_mapped_test_passes(exercise: Exercise, solved: tuple[Path, Run]) -> None:
    if not can_be_checked(exercise):
        pytest.skip(f"{NO_TRITON}")
    root, run = solved
    (verdict,) = (each for each in run.verdicts if each.exercise == exercise)
    assert verdict.outcome is Outcome.PASSED, run.output
    assert verdict.file == str(root / exercise.path)
    assert verdict.num_passed == verdict.num_tests >= 1
