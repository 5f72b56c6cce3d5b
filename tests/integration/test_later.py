"""Lines of finished exercises in the phases after theirs: right ones work there, and a wrong one is found."""

from pathlib import Path

import click
import pytest

from shared.lessons import find_lesson, lessons
from tutorial.screens.later import later_lines
from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of, find_exercise
from tutorial.workshop.later import later_phases, run_later
from tutorial.workshop.mistakes import mistakes_of
from tutorial.workshop.skeleton import filled
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.workspace import Workspace

pytestmark = pytest.mark.slow

MAIN_LINE = [lesson for lesson in lessons() if lesson.generates and not lesson.is_side_track]


def write_reference(root: Path, wanted: tuple[Exercise, ...]) -> None:
    for file in Workspace(root).start(wanted):
        file.write_text(filled(file.read_text(), (ROOT / file.relative_to(root)).read_text())[0])


def test_every_phase_that_generates_is_run_on_the_lines_of_the_phases_before_it() -> None:
    assert later_phases("01b") == MAIN_LINE
    assert [lesson.number for lesson in later_phases("07")] == ["08", "09", "10", "11", "12"]
    assert later_phases("12") == later_phases("9.1") == []


def test_with_the_reference_s_lines_every_later_phase_works(check_server: CheckServer, tmp_path: Path) -> None:
    """All exercises at once, in a workspace."""
    write_reference(tmp_path, exercises())
    found = run_later(check_server, tmp_path, "01b")
    assert {lesson.number: verdict.reason for lesson, verdict in found.items()} == {e.number: "" for e in MAIN_LINE}
    assert {verdict.outcome for verdict in found.values()} == {Outcome.PASSED}


def test_a_wrong_line_that_its_own_phase_hardly_uses_is_found_by_a_later_one(
    check_server: CheckServer, tmp_path: Path
) -> None:
    """Before phase 8 no token is cached when a request is admitted."""
    exercise = find_exercise("04x4")
    write_reference(tmp_path, exercises_of(find_lesson("04")))
    (mistake,) = (each for each in mistakes_of(exercise) if "reserved for the new tokens only" in each.says)
    Workspace(tmp_path).file(exercise).write_text(mistake.text(exercise))
    found = run_later(check_server, tmp_path, "04")
    assert next(each.number for each, verdict in found.items() if verdict.outcome is not Outcome.PASSED) == "08"
    lines = [click.unstyle(line) for line in later_lines("04", found)]
    assert "05 ✓" in lines[0]
    assert "08 ✗" in lines[0]
    assert "phase 08 does not work with your lines" in lines[1]
