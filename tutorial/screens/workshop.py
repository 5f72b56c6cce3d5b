"""``infer workshop``: exercises handed out, checked, solved, reset, merged, graded; bugs. Introduced in phase 1b."""

import difflib
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from shared.errors import ConfigError
from shared.terminal import examples, stdout_console, working
from tutorial.screens.check import (
    COLOURS,
    line_of,
    looks_like,
    screen,
    shown,
    tell_board,
    what_it_bought,
    what_to_write,
)
from tutorial.screens.classroom import COMMANDS as CLASSROOM
from tutorial.screens.classroom import wanted_exercises
from tutorial.screens.hunts import EPILOG, bug
from tutorial.screens.room import COMMANDS as ROOM
from tutorial.screens.room import ask_for_times

if TYPE_CHECKING:
    from tutorial.workshop.exercises import Exercise
    from tutorial.workshop.workspace import State, Workspace

app = typer.Typer(
    help="Exercises: the lines of a phase that matter, taken out for you to write.",
    no_args_is_help=True,
    epilog=examples(
        "infer workshop start 03",
        "infer workshop check 03",
        "infer workshop hint 03x2",
        "INFER_WORKSHOP=1 infer generate --prompt Hello",
    ),
)

PhaseArgument = Annotated[str, typer.Argument(help="A phase, such as 03, or an exercise.", metavar="PHASE")]
OnlyOption = Annotated[str | None, typer.Option("--only", help="One exercise of it, such as 03x2.", metavar="EXERCISE")]
ExerciseArgument = Annotated[str, typer.Argument(help="An exercise, such as 03x2.", metavar="EXERCISE")]


@app.command(epilog=examples("infer workshop start 03", "infer workshop start 03 --only 03x2"))
def start(phase: PhaseArgument, only: OnlyOption = None) -> None:
    """Write a phase's modules into workspace/, with a gap where each exercise is."""
    from shared.kernels import NO_TRITON
    from tutorial.workshop.check import can_be_checked

    workspace = _workspace()
    wanted = wanted_exercises(phase, only)
    files = workspace.start(wanted)
    if not files:
        typer.echo(f"All of that is in {shown(workspace.root)} already; `infer workshop status` shows how far it is.")
    for file in files:
        typer.echo(shown(file))
    for exercise in wanted:
        place = f"line {line_of(workspace, exercise):>4}  about {exercise.minutes:>2} min"
        typer.echo(f"  {exercise.number}  {place}  {exercise.title}")
    if unchecked := [exercise.number for exercise in wanted if not can_be_checked(exercise)]:
        typer.echo(f"\nTo check {', '.join(unchecked)} {NO_TRITON}.")
    again = f"infer workshop check {wanted[0].phase if len(wanted) > 1 else wanted[0].number}"
    typer.echo(f"\nWrite your lines where the file raises NotImplementedError, then run: {again}")
    ask_for_times(workspace)


@app.command(epilog=examples("infer workshop check", "infer workshop check 03", "infer workshop check 03x2 --verbose"))
def check(
    phase: Annotated[
        str | None, typer.Argument(help="A phase or an exercise; by default everything started.", metavar="PHASE")
    ] = None,
    only: OnlyOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of the case that is shown.")] = False,
) -> None:
    """Run the tests of your exercises on your code; exit code 1 unless all of them pass."""
    from tutorial.screens.later import say_later
    from tutorial.workshop.check import CheckServer
    from tutorial.workshop.later import is_finished
    from tutorial.workshop.session import Session
    from tutorial.workshop.verdicts import Outcome
    from tutorial.workshop.warm_server import idle_seconds
    from tutorial.workshop.workspace import State

    workspace = _workspace()
    wanted = _wanted(workspace, phase, only)
    written = [exercise for exercise in wanted if workspace.state(exercise) is State.WRITTEN]
    unfinished = [p for p in dict.fromkeys(e.phase for e in wanted) if not is_finished(workspace, p)]
    with CheckServer(idle_seconds=idle_seconds()) as server:
        session = Session(workspace, server)
        what = f"running the tests of {', '.join(exercise.number for exercise in written)}" if written else ""
        with working(what) if what else nullcontext():
            verdicts = session.check(wanted, tracebacks=verbose)
        for verdict in verdicts:
            typer.echo("\n".join(screen(workspace, verdict)))
            if verdict.outcome is Outcome.FAILED:
                with working(f"comparing {verdict.exercise.number} with known mistakes"):
                    found = session.look(verdict)
                typer.echo("".join(f"{line}\n" for line in looks_like(found)), nl=False)
        say_later(workspace, server, unfinished)
    tell_board(workspace)
    passed = [verdict.exercise for verdict in verdicts if verdict.outcome is Outcome.PASSED]
    typer.echo(f"{len(passed)} of {len(wanted)} passed")
    if passed:
        typer.echo("\n".join(what_it_bought(passed[-1])))
    if all(verdict.outcome in (Outcome.PASSED, Outcome.GAP, Outcome.NEW) for verdict in verdicts):
        _say_what_is_next(workspace, wanted[0])
    if len(passed) < len(wanted):
        raise typer.Exit(1)


@app.command(epilog=examples("infer workshop watch 03", "infer workshop watch 03 --only 03x2"))
def watch(
    phase: Annotated[
        str | None, typer.Argument(help="A phase or an exercise; by default everything started.", metavar="PHASE")
    ] = None,
    only: OnlyOption = None,
) -> None:
    """Check each time you save, and go on to the next exercise when one passes; starts the phase if need be."""
    from tutorial.screens.watch import watch_exercises

    wanted = _wanted(_workspace(), phase, only)
    _workspace().start(wanted)
    ask_for_times(_workspace())
    watch_exercises(_workspace, wanted)


@app.command(epilog=examples("infer workshop hint 03x2", "infer workshop hint 03x2 --all"))
def hint(
    exercise: ExerciseArgument,
    all_hints: Annotated[bool, typer.Option("--all", help="Show every hint.")] = False,
) -> None:
    """Show the next hint of an exercise."""
    from tutorial.workshop.exercises import find_exercise
    from tutorial.workshop.times import Times

    found = find_exercise(exercise)
    workspace = _workspace()
    if not found.hints:
        typer.echo(f"{found.number} has no hint; the docstring of {found.target} says what is wanted.")
        return
    Times(workspace.root).mark([found.number])
    shown = workspace.next_hint(found)
    while all_hints and shown < len(found.hints):
        shown = workspace.next_hint(found)
    for index, text in enumerate(found.hints[:shown], start=1):
        typer.echo(f"{index} of {len(found.hints)}: {text}")
    if shown < len(found.hints):
        typer.echo("The same command again shows the next one.")


@app.command(epilog=examples("infer workshop solution 03x2", "infer workshop solution 03x2 --yes"))
def solution(
    exercise: ExerciseArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Show it without asking.")] = False,
) -> None:
    """Show the difference between your function and the reference's."""
    from tutorial.workshop.exercises import find_exercise, function_lines, reference

    found = find_exercise(exercise)
    workspace = _workspace()
    if not yes and not typer.confirm(f"Show the reference's {found.number} ({found.title})?"):
        raise typer.Exit(1)
    theirs = function_lines(reference(found)[0], found.target)
    file = workspace.file(found)
    text = file.read_text(encoding="utf-8-sig", errors="replace") if file.is_file() else ""
    yours = function_lines(text, found.target)
    labels = (shown(file) if yours else "nothing of yours", f"{found.path} (the reference)")
    console = stdout_console()
    lines = list(difflib.unified_diff(yours, theirs, *labels, lineterm="", n=100))
    for line in lines:
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
        console.print(line, style=style, markup=False, soft_wrap=True)
    if not lines:
        typer.echo(f"Your {found.target} is the reference's, to the letter.")


@app.command(epilog=examples("infer workshop status", "infer workshop status --all"))
def status(
    show_all: Annotated[bool, typer.Option("--all", help="Show every exercise of the course.")] = False,
) -> None:
    """Show how far you are: the exercises of the phase at hand, and how many of the course have passed."""
    from rich import box
    from rich.table import Table

    from tutorial.workshop.times import Times

    workspace = _workspace()
    states = workspace.states()
    passed = {exercise for exercise in states if workspace.has_passed(exercise)}
    phase = _phase_at_hand(states, passed)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    record = Times(workspace.root)
    minutes = record.minutes()
    for name in ("exercise", "state", "estimate", *(["yours"] if record.agreed else []), "what", "where"):
        is_time = name in ("estimate", "yours")
        table.add_column(name, justify="right" if is_time else "left", no_wrap=name in ("exercise", "state"))
    for exercise, state in states.items():
        if not show_all and exercise.phase != phase:
            continue
        said = "passed" if exercise in passed else str(state)
        place = shown(workspace.file(exercise)) if str(state) != "not started" else exercise.path
        own = [_minutes(minutes.get(exercise.number))] if record.agreed else []
        said = f"[{COLOURS.get(said, 'dim')}]{said}[/]"
        table.add_row(exercise.number, said, f"{exercise.minutes} min", *own, exercise.title, place)
    stdout_console().print(table)
    typer.echo(f"{len(passed)} of {len(states)} passed" + ("" if show_all else "; --all shows every exercise"))


@app.command(epilog=examples("infer workshop reset 03", "infer workshop reset 03 --only 03x2"))
def reset(phase: PhaseArgument, only: OnlyOption = None) -> None:
    """Put the gaps back; what you had is kept in workspace/.backups."""
    workspace = _workspace()
    files, backup = workspace.reset(wanted_exercises(phase, only))
    for file in files:
        typer.echo(shown(file))
    typer.echo(f"your files are kept in {shown(backup)}" if backup else "nothing of that had been started")


@app.command(epilog=examples("infer workshop update"))
def update() -> None:
    """Merge what changed in the reference since `start` into your files; exit code 1 if conflicts are left."""
    workspace = _workspace()
    results = workspace.update()
    for result in results:
        said = "is up to date" if not result.is_changed else "took in the changes of the reference"
        if result.num_conflicts:
            said = f"has {result.num_conflicts} conflict(s): solve them between <<<<<<< and >>>>>>>"
        typer.echo(f"{shown(workspace.root / result.path)} {said}")
        if result.backup is not None:
            typer.echo(f"  before: {shown(result.backup)}")
    if not results:
        typer.echo("nothing has been started")
    if any(result.num_conflicts for result in results):
        raise typer.Exit(1)


app.command(epilog=EPILOG)(bug)
for command, epilog in (CLASSROOM | ROOM).items():
    app.command(epilog=epilog)(command)


def _wanted(workspace: "Workspace", phase: str | None, only: str | None) -> "tuple[Exercise, ...]":
    """The exercises of the phase, or all that were started; ConfigError if there are none."""
    from tutorial.workshop.workspace import State

    if phase is not None or only is not None:
        return tuple(wanted_exercises(phase, only))
    started = tuple(exercise for exercise, state in workspace.states().items() if state is not State.NEW)
    if not started:
        raise ConfigError(f"Nothing has been started in {workspace.root}; begin with `infer workshop start 01a`.")
    return started


def _say_what_is_next(workspace: "Workspace", first: "Exercise") -> None:
    """The next exercise that has not passed, from ``first`` on, and where it is."""
    from tutorial.workshop.exercises import exercises

    later = exercises()[exercises().index(first) :]
    if found := next((exercise for exercise in later if not workspace.has_passed(exercise)), None):
        typer.echo(f"next: {found.number} {found.title} (about {found.minutes} min)")
        typer.echo("\n".join(what_to_write(workspace, found)))


def _minutes(minutes: float | None) -> str:
    """A learner's own time for an exercise, rounded up."""
    return "" if minutes is None else f"{math.ceil(minutes)} min"


def _phase_at_hand(states: "dict[Exercise, State]", passed: "set[Exercise]") -> str:
    """The last phase of which something was started and something has not passed; otherwise the first that has not
    passed, or the last of all."""
    left = [exercise.phase for exercise in states if exercise not in passed]
    started = {exercise.phase for exercise, state in states.items() if str(state) != "not started"}
    return [list(states)[-1].phase, *left[:1], *(phase for phase in left if phase in started)][-1]


def _workspace() -> "Workspace":
    from tutorial.workshop.overlay import workspace_folder
    from tutorial.workshop.workspace import Workspace

    return Workspace(workspace_folder())
