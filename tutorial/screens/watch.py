"""``infer workshop watch``: check the exercise at hand on each save, and go on to the next when it passes.

A save while a check runs ends that check, and the next begins. While the learner writes, the known mistakes of the
exercise run, so that a failure can be named at once. After rustlings' watch mode.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import typer

from shared.terminal import working
from tutorial.screens.check import looks_like, screen, shown, tell_board, what_it_bought, what_to_write
from tutorial.screens.later import say_later

if TYPE_CHECKING:
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.exercises import Exercise
    from tutorial.workshop.session import Session
    from tutorial.workshop.workspace import Workspace

SECONDS_PER_LOOK = 0.1
_CLEAR = "\x1b[2J\x1b[H"


class SavedError(Exception):
    """A file was saved while it was being checked."""


def watch_exercises(open_workspace: "Callable[[], Workspace]", wanted: "Sequence[Exercise]") -> None:
    """Until all of these have passed. ``open_workspace`` is called anew for each check, since hints are noted too."""
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.later import is_finished
    from tutorial.workshop.warm_server import idle_seconds
    from tutorial.workshop.workspace import State

    phases = dict.fromkeys(exercise.phase for exercise in wanted)
    unfinished = [phase for phase in phases if not is_finished(open_workspace(), phase)]
    with CheckServer(idle_seconds=idle_seconds()) as server, ThreadPoolExecutor(1) as background:
        runs: dict[Exercise, Future] = {}
        is_over = Event()
        has_passed = False  # the exercise before; what was said of it stays on the screen
        saved: set[Path] = set()
        try:
            while True:
                workspace = open_workspace()
                left = [exercise for exercise in wanted if not workspace.has_passed(exercise)]
                if not left:
                    say_later(workspace, server, unfinished)
                    break
                before = _state(workspace)
                written = (exercise for exercise in left if workspace.state(exercise) is State.WRITTEN)
                now = next(written, left[0])
                if now not in runs:
                    runs[now] = background.submit(_prepare, server, workspace, now, is_over)
                clears = sys.stdout.isatty() and not has_passed
                try:
                    has_passed = _check(_session(workspace, server), now, wanted, runs[now], before, saved, clears)
                except SavedError:
                    has_passed = False
                if not has_passed:
                    saved = _wait_for_a_change(workspace, before)
        except KeyboardInterrupt:
            pass
        finally:
            is_over.set()
    workspace = open_workspace()
    num_passed = sum(workspace.has_passed(exercise) for exercise in wanted)
    typer.echo(f"\n{num_passed} of {len(wanted)} passed")
    if num_passed == len(wanted):
        typer.echo("What your lines gain on this machine, phase by phase: infer workshop chart")


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


def _check(
    session: "Session",
    exercise: "Exercise",
    wanted: "Sequence[Exercise]",
    known: Future,
    before: dict[Path, int],
    saved: set[Path],
    clears: bool,
) -> bool:
    """Check one exercise and show it, on an empty screen if ``clears``; whether it passed. Raises `SavedError` if a
    file has been written since ``before``."""
    from tutorial.workshop.verdicts import Outcome
    from tutorial.workshop.workspace import State

    workspace = session.workspace

    def look(*_: object) -> None:
        if _state(workspace) != before:
            raise SavedError

    if workspace.state(exercise) is State.WRITTEN:
        typer.echo(f"checking {exercise.number} …")
    (verdict,) = session.check([exercise], watch=look)
    tell_board(workspace)
    if clears:
        typer.echo(_CLEAR, nl=False)
    if verdict.outcome is Outcome.GAP:
        number = 1 + list(wanted).index(exercise)
        typer.echo(f"{number} of {len(wanted)}: {exercise.number} {exercise.title} (about {exercise.minutes} min)")
        typer.echo("\n".join(what_to_write(workspace, exercise)))
        _say_what_else_was_saved(workspace, exercise, saved)
        typer.echo("\neach time you save, it is checked; Ctrl-C ends")
        return False
    typer.echo("\n".join(screen(workspace, verdict)))
    if verdict.outcome is Outcome.PASSED:
        typer.echo("\n".join(what_it_bought(exercise)) + "\n")
        return True
    if verdict.outcome is Outcome.FAILED:
        with working("comparing with known mistakes"):
            while not wait([known], SECONDS_PER_LOOK).done:
                look()
            found = session.look(verdict, look)  # what that run found is kept; an error comes again here
        typer.echo("".join(f"{line}\n" for line in looks_like(found)), nl=False)
    _say_what_else_was_saved(workspace, exercise, saved)
    typer.echo("\nsave the file to check again; Ctrl-C ends")
    return False


def _say_what_else_was_saved(workspace: "Workspace", exercise: "Exercise", saved: set[Path]) -> None:
    """The files that were saved and do not hold the exercise at hand."""
    own = workspace.file(exercise)
    for file in sorted(saved - {own}):
        typer.echo(f"\nsaved: {shown(file)}; but what is checked is {exercise.number}, in {shown(own)}")


def _state(workspace: "Workspace") -> dict[Path, int]:
    """When each module of the workspace was last written."""
    found = {}
    for file in (workspace.root / "shared").rglob("*.py"):
        with suppress(FileNotFoundError):  # while an editor replaces it
            found[file] = file.stat().st_mtime_ns
    return found


def _wait_for_a_change(workspace: "Workspace", before: dict[Path, int]) -> set[Path]:
    """The files that have been written since ``before``, once they are written no more."""
    last = before
    while True:
        now = _state(workspace)
        if now != before and now == last and now.keys() >= before.keys():
            return {file for file, at in now.items() if before.get(file) != at}
        last = now
        time.sleep(SECONDS_PER_LOOK)
