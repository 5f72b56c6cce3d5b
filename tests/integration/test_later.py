"""Lines of finished exercises in the phases after theirs: right ones work there, and a wrong one is found."""

from pathlib import Path

import click
import pytest

from shared.lessons import find_lesson, lessons
from tutorial.screens.later import later_lines
from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import ROOT, Exercise, exercises, exercises_of, find_exercise, reference
from tutorial.workshop.later import later_phases, run_later
from tutorial.workshop.mistakes import mistakes_of
from tutorial.workshop.skeleton import filled
from tutorial.workshop.verdicts import Outcome
from tutorial.workshop.workspace import Workspace

pytestmark = pytest.mark.slow

MAIN_LINE = [lesson for lesson in lessons() if lesson.generates and not lesson.is_side_track]


def write_reference(root: Path, wanted: tuple[Exercise, ...]) -> Workspace:
    """A workspace in which these exercises have the reference's lines."""
    workspace = Workspace(root)
    for file in workspace.start(wanted):
        file.write_text(filled(file.read_text(), (ROOT / file.relative_to(root)).read_text())[0])
    return workspace


def as_passed(workspace: Workspace, wanted: tuple[Exercise, ...]) -> Workspace:
    """The workspace, which remembers that these have passed as they are."""
    for exercise in wanted:
        workspace.note_check(exercise, passed=True)
    return workspace


def test_every_phase_that_generates_is_run_on_the_lines_of_the_phases_before_it() -> None:
    assert later_phases("01b") == MAIN_LINE
    assert [lesson.number for lesson in later_phases("07")] == ["08", "09", "10", "11", "12"]
    assert later_phases("12") == later_phases("9.1") == []


def test_with_the_reference_s_lines_every_later_phase_works(check_server: CheckServer, tmp_path: Path) -> None:
    """All exercises at once, in a workspace."""
    found = run_later(check_server, as_passed(write_reference(tmp_path, exercises()), exercises()), "01b")
    assert {lesson.number: verdict.reason for lesson, verdict in found.items()} == {e.number: "" for e in MAIN_LINE}
    assert {verdict.outcome for verdict in found.values()} == {Outcome.PASSED}


def test_a_wrong_line_that_its_own_phase_hardly_uses_is_found_by_a_later_one(
    check_server: CheckServer, tmp_path: Path
) -> None:
    """Before phase 8 no token is cached when a request is admitted. Lines that are half written do not run."""
    exercise, half = find_exercise("04x4"), find_exercise("05x1")
    of_04 = exercises_of(find_lesson("04"))
    workspace = write_reference(tmp_path, (*of_04, half))
    text = workspace.file(half).read_text()
    lines = reference(half)[1].lines
    half_written = text.replace("\n".join(lines), "        raise ValueError")
    assert half_written != text
    workspace.file(half).write_text(half_written)
    (mistake,) = (each for each in mistakes_of(exercise) if "reserved for the new tokens only" in each.says)
    workspace.file(exercise).write_text(mistake.text(exercise))
    found = run_later(check_server, as_passed(workspace, of_04), "04")
    assert next(each.number for each, verdict in found.items() if verdict.outcome is not Outcome.PASSED) == "08"
    lines = [click.unstyle(line) for line in later_lines("04", found)]
    assert "05 ✓" in lines[0]
    assert "08 ✗" in lines[0]
    assert "phase 08 does not work with your lines" in lines[1]
