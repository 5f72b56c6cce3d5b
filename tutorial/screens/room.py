"""``infer workshop doctor | prepare | board | join | leave | times``: machines and learners of a room.

The commands only read their options and print; ``tutorial.workshop`` does the work. Introduced in phase 1b. Invariant:
what is sent to a board, and what is recorded, is said before it is.
"""

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.engine.config import EngineConfig
from shared.errors import ConfigError, InferError
from shared.terminal import examples, fetch_if_known, printable, stdout_console
from tutorial.screens.check import shown

if TYPE_CHECKING:
    from tutorial.workshop.workspace import Workspace


def doctor() -> None:
    """Say whether this machine is ready, even without a network; exit code 1 with what is missing."""
    from tutorial.workshop.preparation import look

    missing = 0
    for item in look():
        mark = typer.style("ready  ", fg="green") if item.is_ready else typer.style("missing", fg="red")
        typer.echo(f"{mark}  {item.name:<11}  {item.detail}")
        missing += not item.is_ready
    if missing:
        raise typer.Exit(1)
    typer.echo("This machine needs no network for the class.")


def prepare() -> None:
    """Make this machine ready for a class without a network; exit code 1 with what is missing."""
    try:
        fetch_if_known(EngineConfig.model, asks=False)
    except InferError as error:  # what is missing is said below, with everything else
        typer.echo(" ".join(str(error).split()), err=True)
    doctor()


def board(
    submissions: Annotated[
        list[Path] | None,
        typer.Argument(help="Workspaces, as folders or zip files; without any, learners join.", metavar="[DIR]..."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Listen at this address; 0.0.0.0 lets other machines join.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Listen at this port.", min=0, max=65535)] = 8077,
) -> None:
    """Show who is at which exercise, and stuck on which case: of workspaces, or live, of learners who have joined.

    Names are chosen by learners. Nothing of their code runs, is sent or is kept.
    """
    from tutorial.workshop.board import Board

    if submissions:
        _print_board(submissions)
        return
    with Board(host, port) as server:
        typer.echo(f"the board   {server.address}")
        typer.echo(f"learners    infer workshop join {server.address} NAME")
        if host == "127.0.0.1":
            typer.echo("            on this machine alone; --host 0.0.0.0 lets others join")
        elif host == "0.0.0.0":
            typer.echo("            with this machine's address instead of 0.0.0.0")
        typer.echo("\nCtrl-C ends it; nothing is kept")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


def join(
    address: Annotated[str, typer.Argument(help="The address that the teacher's board shows.", metavar="URL")],
    name: Annotated[str, typer.Argument(help="The name that the board is to show.", metavar="NAME")],
) -> None:
    """Have each check tell a teacher's board where you are."""
    from tutorial.workshop.board import join as join_board

    join_board(_workspace().root, address, name)
    typer.echo(f"From now on each check tells the board, as {printable(name)}: the exercise that you are at, the test")
    typer.echo("that fails, how often it failed, how many hints you saw, how many exercises have passed, and when.")
    typer.echo("Your lines stay here. `infer workshop leave` ends it, and takes you off the board.")


def leave() -> None:
    """Tell the teacher's board nothing more."""
    from tutorial.workshop.board import leave as leave_board

    left = leave_board(_workspace().root)
    typer.echo(f"you have left {left}" if left else "you had joined no board")


class Switch(StrEnum):
    """Whether times are recorded."""

    ON = "on"
    OFF = "off"


def times(
    switch: Annotated[Switch | None, typer.Argument(help="on: record them; off: stop, and delete the record.")] = None,
) -> None:
    """Record here how long your exercises take, for `infer workshop status`; nothing is sent."""
    from tutorial.workshop.times import Times

    record = Times(_workspace().root)
    if switch is not None:
        record.agree(switch is Switch.ON)
    elif not record.agreed:
        typer.echo("times are off; `infer workshop times on` records them")
        return
    if record.agreed:
        minutes = record.minutes()
        typer.echo(f"times are recorded in {shown(record.file)}, and not sent")
        typer.echo(f"{len(minutes)} exercises, {round(sum(minutes.values()))} min; `infer workshop status` shows them")
    else:
        typer.echo("times are off, and what was recorded is deleted")


def ask_for_times(workspace: "Workspace") -> None:
    """Ask once whether times may be recorded, at a terminal; and note that work begins."""
    from tutorial.workshop.times import Times

    record = Times(workspace.root)
    if record.agreed is None and sys.stdin.isatty() and sys.stdout.isatty():
        typer.echo(
            "\nThe course can note how long your exercises take, in your workspace alone, and show it in `status`."
        )
        record.agree(typer.confirm("Note it?", default=False))
    record.mark()


COMMANDS: dict[Callable[..., None], str] = {
    doctor: examples("infer workshop doctor"),
    prepare: examples("infer workshop prepare", "make workshop"),
    board: examples("infer workshop board --host 0.0.0.0", "infer workshop board submissions/*.zip"),
    join: examples("infer workshop join http://192.168.0.7:8077/WORD Ada"),
    leave: examples("infer workshop leave"),
    times: examples("infer workshop times", "infer workshop times on", "infer workshop times off"),
}
"""Each command with the epilog of its help."""


def _print_board(submissions: list[Path]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tutorial.workshop.board import COLUMNS, board_rows
    from tutorial.workshop.grading import names_of
    from tutorial.workshop.standing import read_standing

    for path in submissions:
        if not path.exists():
            raise ConfigError(f"There is no submission {path}; name folders or zip files that exist.")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=column in ("name", "at", "passed", "last check"))
    standings = [read_standing(path, name) for path, name in zip(submissions, names_of(submissions), strict=True)]
    for row in board_rows(standings):
        table.add_row(*(Text(printable(text)) for text in row))
    stdout_console().print(table)


def _workspace() -> "Workspace":
    from tutorial.workshop.overlay import workspace_folder
    from tutorial.workshop.workspace import Workspace

    return Workspace(workspace_folder())
