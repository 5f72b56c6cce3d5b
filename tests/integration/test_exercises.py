"""Every exercise proved: with a gap its tests fail by the gap, with the reference's lines they pass, and no earlier
phase notices. Each proof is a run of pytest of its own, as ``infer workshop check`` makes it."""

from pathlib import Path

import pytest

from shared.lessons import Lesson, lessons
from tutorial.workshop.check import Outcome, run_pytest, run_tests
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of
from tutorial.workshop.skeleton import filled
from tutorial.workshop.workspace import Workspace

EXERCISES = exercises()
LESSONS = lessons()
PAIRS = [(old, new) for new in LESSONS for old in LESSONS if old.number == new.previous]


def by_number(value: Exercise | Lesson) -> str:
    return value.number


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


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_number)
def test_with_a_gap_every_mapped_test_fails_by_it(exercise: Exercise, tmp_path: Path) -> None:
    Workspace(tmp_path).start([exercise])
    proof = run_tests(tmp_path, [exercise], gaps_raise=True)
    (verdict,) = proof.verdicts
    assert verdict.outcome is Outcome.FAILED, proof.output
    assert verdict.num_tests >= len(exercise.tests)
    assert verdict.num_passed == 0, f"tests that do not notice the gap:\n{proof.output}"
    assert set(proof.errors.values()) == {f"NotImplementedError: {exercise.message}"}, proof.output
    for test in exercise.tests:
        assert any(name == test or name.startswith(f"{test}[") for name in proof.errors), f"{test} did not run"


@pytest.mark.parametrize("lesson", LESSONS, ids=by_number)
def test_with_the_reference_s_lines_every_mapped_test_passes(lesson: Lesson, tmp_path: Path) -> None:
    wanted = exercises_of(lesson)
    for file in Workspace(tmp_path).start(wanted):
        text, numbers = filled(file.read_text(), (ROOT / file.relative_to(tmp_path)).read_text())
        assert numbers
        file.write_text(text)
    run = run_tests(tmp_path, wanted, gaps_raise=True)
    assert tuple(verdict.exercise for verdict in run.verdicts) == wanted
    for verdict in run.verdicts:
        assert verdict.outcome is Outcome.PASSED, run.output
        assert verdict.file == str(tmp_path / verdict.exercise.path)
        assert verdict.num_passed == verdict.num_tests >= 1


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda lesson: lesson.number)
def test_the_phase_before_passes_with_all_gaps_of_a_phase(old: Lesson, new: Lesson, tmp_path: Path) -> None:
    Workspace(tmp_path).start(exercises_of(new))
    # One family will do; long comparisons, and checks of the tests themselves, say nothing more about imports.
    left_out = ("qwen3", "gemma3_text", "transformers", "mutation", "half", "bf16")
    options = ["-m", "not demo and not gpu and not measured", "-k", " and ".join(f"not {word}" for word in left_out)]
    code, output = run_pytest(tmp_path, [str(old.folder.relative_to(ROOT)), *options], gaps_raise=True, seconds=300)
    assert code == 0, output
