"""``infer workshop watch``: check the exercise at hand on each save, and go on to the next when it passes.

The process stays: PyTorch is imported once, and each check is a fork of that. While the learner writes, the known
mistakes of the exercise run, so that a failure can be named at once. After rustlings' watch mode.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import typer

from shared.lessons import find_lesson
from shared.terminal import working
from tutorial.screens.check import line_of, looks_like, screen, shown
from tutorial.screens.later import say_later

if TYPE_CHECKING:
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.exercises import Exercise
    from tutorial.workshop.session import Session
    from tutorial.workshop.workspace import Workspace

SECONDS_PER_LOOK = 0.1
_CLEAR = "\x1b[2J\x1b[H"
_FIRST_WITH_TEXT = "02"
"""The first phase that generates; earlier ones compute logits."""


def watch_exercises(open_workspace: "Callable[[], Workspace]", wanted: "Sequence[Exercise]") -> None:
    """Until all of these have passed. ``open_workspace`` is called anew for each check, since hints are noted too."""
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.later import is_finished
    from tutorial.workshop.workspace import State

    phases = dict.fromkeys(exercise.phase for exercise in wanted)
    unfinished = [phase for phase in phases if not is_finished(open_workspace(), phase)]
    with CheckServer() as server, ThreadPoolExecutor(1) as background:
        runs: dict[Exercise, Future] = {}
        is_over = Event()
        has_passed = False  # the exercise before; what was said of it stays on the screen
        try:
            while True:
                workspace = open_workspace()
                left = [exercise for exercise in wanted if not workspace.has_passed(exercise)]
                if not left:
                    say_later(workspace, server, unfinished)
                    break
                before = _state(workspace, wanted)
                written = (exercise for exercise in left if workspace.state(exercise) is State.WRITTEN)
                now = next(written, left[0])
                if now not in runs:
                    runs[now] = background.submit(_prepare, server, workspace, now, is_over)
                clears = sys.stdout.isatty() and not has_passed
                has_passed = _check(_session(workspace, server), now, wanted, runs[now], clears)
                if not has_passed:
                    _wait_for_a_change(workspace, wanted, before)
        except KeyboardInterrupt:
            pass
        finally:
            is_over.set()
    workspace = open_workspace()
    num_passed = sum(workspace.has_passed(exercise) for exercise in wanted)
    typer.echo(f"\n{num_passed} of {len(wanted)} passed")
    if num_passed == len(wanted):
        typer.echo("What your lines buy on this machine, phase by phase: infer workshop chart")


def _session(workspace: "Workspace", server: "CheckServer") -> "Session":
    from tutorial.workshop.session import Session

    return Session(workspace, server)


def _prepare(server: "CheckServer", workspace: "Workspace", exercise: "Exercise", is_over: Event) -> None:
    """Find out what the known mistakes do, which also starts the server; ends soon once the watch is over."""
    from tutorial.workshop.check import RunEndedError

    def look(pid: int, record: Path) -> None:
        if is_over.is_set():
            raise RunEndedError("the watch is over")

    _session(workspace, server).known(exercise, look)


def _check(session: "Session", exercise: "Exercise", wanted: "Sequence[Exercise]", known: Future, clears: bool) -> bool:
    """Check one exercise and show it, on an empty screen if ``clears``; whether it passed."""
    from tutorial.workshop.verdicts import Outcome

    workspace = session.workspace
    with working(f"checking {exercise.number}"):
        (verdict,) = session.check([exercise])
    if clears:
        typer.echo(_CLEAR, nl=False)
    if verdict.outcome is Outcome.GAP:
        _say_what_to_write(workspace, exercise, wanted)
        return False
    typer.echo("\n".join(screen(workspace, verdict)))
    if verdict.outcome is Outcome.PASSED:
        _say_what_it_bought(exercise)
        return True
    if verdict.outcome is Outcome.FAILED:
        with working("comparing with known mistakes"):
            known.exception()  # what it finds is kept; an error comes again in what follows
            found = session.look(verdict)
        typer.echo("".join(f"{line}\n" for line in looks_like(found)), nl=False)
    typer.echo("\nsave the file to check again; Ctrl-C ends")
    return False


def _say_what_to_write(workspace: "Workspace", exercise: "Exercise", wanted: "Sequence[Exercise]") -> None:
    place = f"{shown(workspace.file(exercise))}:{line_of(workspace, exercise)}"
    number = 1 + list(wanted).index(exercise)
    typer.echo(f"{number} of {len(wanted)}: {exercise.number} {exercise.title} (about {exercise.minutes} min)")
    typer.echo(f"  write it at {place}")
    if exercise.hints:
        typer.echo(f"  in another terminal: infer workshop hint {exercise.number}")
    typer.echo("\neach time you save, it is checked; Ctrl-C ends")


def _say_what_it_bought(exercise: "Exercise") -> None:
    phase = max(exercise.phase, _FIRST_WITH_TEXT)
    command = f'INFER_WORKSHOP=1 infer generate --phase {phase} --prompt "The capital of France is" --stats'
    typer.echo(f"  a step towards: {find_lesson(exercise.phase).question}")
    typer.echo(f"  on your lines: {command}\n")


def _state(workspace: "Workspace", wanted: "Sequence[Exercise]") -> dict[Path, int]:
    """When each file of these exercises was last written; 0 while an editor replaces it."""
    files = {workspace.file(exercise) for exercise in wanted}
    return {file: file.stat().st_mtime_ns if file.is_file() else 0 for file in files}


def _wait_for_a_change(workspace: "Workspace", wanted: "Sequence[Exercise]", before: dict[Path, int]) -> None:
    """Return once a file has been written since ``before`` and is written no more."""
    last = before
    while True:
        now = _state(workspace, wanted)
        if now != before and now == last and all(now.values()):
            return
        last = now
        time.sleep(SECONDS_PER_LOOK)
