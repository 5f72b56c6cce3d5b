"""What the lines of a finished phase do in the phases after it.

The tests of an exercise look at a function by itself. A later phase uses the same function in another way: with a step
in flight, or with prompts of which a part is cached. So when a learner has finished a phase, the whole engine of each
later phase runs once on their lines. Introduced in phase 1b. Invariant: lines that have not passed do not run.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shared.lessons import Lesson, find_lesson, lessons
from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import exercises, exercises_of, reference
from tutorial.workshop.skeleton import with_gap
from tutorial.workshop.verdicts import Verdict
from tutorial.workshop.workspace import State, Workspace

PROCESSOR_SECONDS = 60.0
"""Of one phase; right code takes 5 at most."""


def is_finished(workspace: Workspace, phase: str) -> bool:
    """Whether every exercise of a phase has passed."""
    return all(map(workspace.has_passed, exercises_of(find_lesson(phase))))


def later_phases(phase: str) -> list[Lesson]:
    """The phases that build on this one and have a test of their whole engine, in order."""
    return [lesson for lesson in lessons() if lesson.whole is not None and phase in _ways(lesson)]


def run_later(server: CheckServer, workspace: Workspace, phase: str) -> dict[Lesson, Verdict]:
    """A verdict on the lines of a workspace in each later phase; gaps, and lines that have not passed, run as the
    reference's."""
    last, found = exercises_of(find_lesson(phase))[-1], later_phases(phase)
    if not found:
        return {}
    wanted = [replace(last, tests=(lesson.whole or "",), processor_seconds=PROCESSOR_SECONDS) for lesson in found]
    with tempfile.TemporaryDirectory(prefix="later-") as folder:
        copy_passed(workspace, Path(folder))
        run = server.run(Path(folder), wanted)
    return dict(zip(found, run.verdicts, strict=True))


def copy_passed(workspace: Workspace, folder: Path) -> None:
    """Copy the modules of a workspace, with a gap for each exercise that has not passed."""
    for exercise in exercises():
        if workspace.state(exercise) is State.NEW:
            continue
        copy = folder / exercise.path
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(workspace.file(exercise), copy)
        if not workspace.has_passed(exercise):
            before = copy.read_text(encoding="utf-8", errors="replace")
            if (text := with_gap(before, reference(exercise)[1])) is not None:
                copy.write_text(text, encoding="utf-8")


def _ways(lesson: Lesson) -> Iterator[str]:
    """The numbers of the phases before this one, the newest first."""
    while lesson.previous is not None:
        yield lesson.previous
        lesson = find_lesson(lesson.previous)
