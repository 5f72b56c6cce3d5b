"""``infer workshop bug``: bug hunts, planted, shown, checked and given up. Introduced in phase 3.

Invariant: until a hunt is over, only a check that fails names what belongs to the fault, its tests.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from shared.errors import ConfigError
from shared.lessons import find_lesson
from shared.terminal import examples, stdout_console, working
from tutorial.screens.check import headline, screen, shown

if TYPE_CHECKING:
    from tutorial.workshop.hunts import HuntFolder

EPILOG = examples(
    "infer workshop bug 08",
    "infer workshop bug 08b1 --run",
    "infer workshop bug 08b1 --hint",
    "infer workshop bug 08b1 --check",
    "infer workshop bug --seed 7",
)


def bug(
    name: Annotated[
        str | None, typer.Argument(help="A hunt, such as 08b1, or a phase, such as 08.", metavar="[BUG]")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Choose by this number: a room gets the same bug.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run the user's script on your copy.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Run the phase's tests on your copy.")] = False,
    hint: Annotated[bool, typer.Option("--hint", help="Show the next hint.")] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="Show the fault.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="Show all hunts, and which you have solved.")] = False,
) -> None:
    """Hunt a bug: a fault is planted in a copy of a phase, and all that you get is what a user reported.

    The copy lies in workspace/bugs; your exercises stay as they are. Of a phase, the first bug that is left is planted.
    --run, --check, --hint and --give-up without a name are for the one bug that is planted.
    --run ends with exit code 1 while the symptom is there, --check unless the bug is solved.
    """
    from tutorial.workshop.hunts import HuntFolder, find_hunts
    from tutorial.workshop.overlay import workspace_folder

    actions = {"--run": run, "--check": check, "--hint": hint, "--give-up": give_up}
    if sum((*actions.values(), list_all)) > 1:
        raise ConfigError("--run, --check, --hint, --give-up and --list exclude each other; give one of them.")
    folders = [HuntFolder(workspace_folder(), each) for each in find_hunts(name)]
    for folder in folders:
        if folder.problem:
            typer.echo(folder.problem, err=True)
    action = next((option for option, is_given in actions.items() if is_given), None)
    if list_all or (name is None and seed is None and action is None):
        _list(folders)
        return
    folder = _the_open_one(folders, action) if action and name is None and seed is None else _chosen(folders, seed)
    was_planted = folder.is_planted
    folder.plant()
    if run:
        raise typer.Exit(folder.run_report())
    if check:
        _check(folder)
    elif hint:
        _hint(folder)
    elif give_up:
        _give_up(folder)
    else:
        _report(folder, was_planted)


def _chosen(folders: "Sequence[HuntFolder]", seed: int | None) -> "HuntFolder":
    """The hunt that a seed chooses; without one the first that is planted and not over, else the first not over."""
    if seed is not None:
        return folders[seed % len(folders)]
    left = [folder for folder in folders if not (folder.state.is_solved or folder.state.is_given_up)]
    return next((folder for folder in left if folder.is_planted), next(iter(left), folders[0]))


def _the_open_one(folders: "Sequence[HuntFolder]", action: str) -> "HuntFolder":
    """The one hunt that is planted; of several, the one that is not over. ConfigError if that is not one."""
    planted = [folder for folder in folders if folder.is_planted]
    found = [folder for folder in planted if state_of(folder) == "planted"] or planted
    if len(found) != 1:
        are = f"bugs {', '.join(folder.hunt.number for folder in found)} are planted" if found else "no bug is planted"
        raise ConfigError(f"{are.capitalize()}; name the one you mean: infer workshop bug 08b1 {action}.")
    return found[0]


def _report(folder: "HuntFolder", was_planted: bool) -> None:
    hunt = folder.hunt
    typer.echo(f"{hunt.number}  {typer.style(hunt.title, bold=True)}  (about {hunt.minutes} min)\n")
    typer.echo(f"{hunt.said.partition(chr(10))[2].strip()}\n")
    lesson = find_lesson(hunt.phase)
    typer.echo(f"  your copy  {shown(folder.root)}/shared: phase {lesson.number}, {lesson.title}, one fault in it")
    typer.echo(f"  see it     infer workshop bug {hunt.number} --run    (the script: {shown(hunt.report)})")
    typer.echo(f"  stuck      infer workshop bug {hunt.number} --hint   ({len(hunt.hints)} hints)")
    typer.echo(f"  fixed      infer workshop bug {hunt.number} --check")
    if was_planted:
        typer.echo(f"\nIt was planted before; delete {shown(folder.root)} to plant it anew.")


def _check(folder: "HuntFolder") -> None:
    from shared.kernels import NO_TRITON
    from tutorial.workshop.check import CheckServer, can_be_checked
    from tutorial.workshop.limits import limit_memory
    from tutorial.workshop.session import not_compiled
    from tutorial.workshop.verdicts import Outcome
    from tutorial.workshop.workspace import Workspace

    hunt = folder.hunt
    if not can_be_checked(judged := hunt.judged(hunt.tests)):
        raise ConfigError(f"To check {hunt.number} {NO_TRITON}.")
    files = (folder.root / path for path in hunt.paths)
    anew = f"delete {shown(folder.root)} to plant the bug anew"
    if broken := next(filter(None, (not_compiled(judged, file, anew) for file in files if file.is_file())), None):
        typer.echo("\n".join(screen(Workspace(folder.root), broken)))
        raise typer.Exit(1)
    with CheckServer() as server, working(f"running the tests of {hunt.number}"):
        run = partial(server.run, folder.root, gaps_raise=True, before=limit_memory)
        (verdict,) = run([judged]).verdicts
        if verdict.outcome is Outcome.PASSED:
            (verdict,) = run([hunt.judged(hunt.tests_of_phase)]).verdicts
    if verdict.outcome is not Outcome.PASSED:
        typer.echo("\n".join(screen(Workspace(folder.root), verdict)))
        raise typer.Exit(1)
    folder.note(solved=True)
    typer.echo(headline(verdict))
    typer.echo(f"  solved: {verdict.num_passed} tests of phase {hunt.phase} pass")
    _tell(folder)


def _hint(folder: "HuntFolder") -> None:
    hints = folder.hunt.hints
    shown_hints = folder.next_hint()
    for index, text in enumerate(hints[:shown_hints], start=1):
        typer.echo(f"{index} of {len(hints)}: {text}")
    if shown_hints < len(hints):
        typer.echo("The same command again shows the next one.")


def _give_up(folder: "HuntFolder") -> None:
    folder.note(given_up=True)
    console = stdout_console()
    for line in folder.difference():
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
        console.print(line, style=style, markup=False, soft_wrap=True)
    _tell(folder)


def _tell(folder: "HuntFolder") -> None:
    typer.echo(f"  the promise that was broken, in {folder.hunt.module}: {folder.hunt.breaks}")


def _list(folders: "Sequence[HuntFolder]") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("bug", "state", "minutes", "report"):
        table.add_column(name, justify="right" if name == "minutes" else "left", no_wrap=name in ("bug", "state"))
    for folder in folders:
        said = state_of(folder)
        colour = {"solved": "green", "given up": "yellow", "planted": "cyan"}.get(said, "dim")
        table.add_row(folder.hunt.number, f"[{colour}]{said}[/]", str(folder.hunt.minutes), folder.hunt.title)
    stdout_console().print(table)
    num_solved = sum(folder.state.is_solved for folder in folders)
    typer.echo(f"{num_solved} of {len(folders)} solved")


def state_of(folder: "HuntFolder") -> str:
    """How far a hunt is, in a word."""
    if folder.state.is_solved:
        return "solved"
    if folder.state.is_given_up:
        return "given up"
    return "planted" if folder.is_planted else "-"
