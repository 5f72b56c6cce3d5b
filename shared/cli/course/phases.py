"""``infer phases``: the table of the course, and ``infer phases sync``. Introduced in phase 1b."""

from typing import Annotated

import typer

from shared.lessons import find_lesson, lessons
from shared.terminal import examples, stdout_console

EPILOG = examples("infer phases", "infer phases sync prefill --from 02")
SYNC_EPILOG = examples("infer phases sync generate", "infer phases sync __init__ --from 02 --dry-run")

app = typer.Typer(
    help="List the phases: number, title, question, and the shared modules that each adds.",
    invoke_without_command=True,
    epilog=EPILOG,
)


@app.callback()
def phases(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is not None:
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    table.add_column("phase", style="bold cyan", no_wrap=True)
    table.add_column("title", style="bold", min_width=16)
    table.add_column("the question it answers", ratio=2)
    table.add_column("what it adds to shared/", style="dim", ratio=3)
    for lesson in lessons():
        added = ", ".join(module.removeprefix("shared.") for module in lesson.adds)
        title = f"{lesson.title}\n(side track)" if lesson.is_side_track else lesson.title
        table.add_row(lesson.number, title, lesson.question, added or "-")
    stdout_console().print(table)


@app.command("sync", epilog=SYNC_EPILOG)
def sync(
    method: Annotated[str, typer.Argument(help="A method of Engine.")],
    source: Annotated[
        str | None, typer.Option("--from", help="The phase to copy from; default: the newest with the method.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files that would change, and change none.")
    ] = False,
) -> None:
    """Copy a method of Engine to every phase that shares it, up to phases whose `changes` names it."""
    from shared.cli.course.sync import newest_with, sync_method

    name = method.removeprefix("Engine.")
    lesson = newest_with(name) if source is None else find_lesson(source)
    changed, sharing = sync_method(lesson, name, dry_run=dry_run)
    for path in changed:
        typer.echo(f"{'would change' if dry_run else 'changed'} {path}")
    numbers = ", ".join(other.number for other in sharing)
    typer.echo(
        f"{name} of phase {lesson.number} is shared by {numbers}: {len(changed)} of {len(sharing)} files differed."
    )
