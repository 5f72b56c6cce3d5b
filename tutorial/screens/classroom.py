"""``infer workshop chart | export | grade``: what a class makes and hands in. Introduced in phase 1b.

The commands only read their options and print; ``tutorial.workshop`` does the work. Invariant: what a submission says
reaches the terminal as text, never as its orders.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import find_lesson
from shared.terminal import PLAIN_WIDTH, examples, fetch_if_known, printable, stdout_console, working

if TYPE_CHECKING:
    from tutorial.workshop.exercises import Exercise
    from tutorial.workshop.grading import Row

_MARKS = {"passed": "✓", "failed": "✗", "not run": "!", "to do": "·", "not started": "-"}
_COLOURS = {"passed": "green", "failed": "red", "not run": "red", "to do": "yellow"}
_MOST_LETTERS = 160


def chart(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write JSON, Markdown and PNG, named by machine, into this folder."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A model folder, a known name, or a hub name owner/name.", envvar="INFER_MODEL"
        ),
    ] = EngineConfig.model,
) -> None:
    """Show your rows of the ladder: what each phase that you have finished gains on this machine, with your code.

    The last line on standard output is the result as JSON.
    """
    from tutorial.workshop.chart import finished_phases, run_ladder
    from tutorial.workshop.overlay import workspace_folder
    from tutorial.workshop.workspace import Workspace

    workspace = Workspace(workspace_folder())
    phases = finished_phases(workspace)
    if not phases:
        raise ConfigError(
            f"No phase that the ladder measures is finished in {workspace.root}; begin with `infer workshop start 03`."
        )
    fetch_if_known(model)
    typer.echo(f"on your lines: phase {', '.join(phases)}")
    typer.echo(run_ladder(workspace, phases, model, out), nl=False)


def export(
    phases: Annotated[list[str], typer.Argument(help="Phases, such as 03 04.", metavar="PHASE...")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The zip file; by default infer-workshop-NN-NN.zip, here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Pack phases for handing out, in one file: chapters, skeleton, tests to read, and a README for the student."""
    from tutorial.workshop.handout import export as pack
    from tutorial.workshop.handout import handout_name

    wanted = [find_lesson(phase) for phase in dict.fromkeys(phases)]
    file = out or Path(f"{handout_name(wanted)}.zip")
    members = pack(wanted, file, force=force)
    for member in members:
        typer.echo(f"  {member}")
    typer.echo(f"wrote {file}, {file.stat().st_size / 1e3:.0f} kB")


def grade(
    submissions: Annotated[
        list[Path], typer.Argument(help="Folders or zip files: a workspace, or what holds one.", metavar="DIR")
    ],
    phase: Annotated[
        str | None, typer.Option("--phase", "-p", help="One phase; by default every exercise that was handed in.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", help="One exercise or bug hunt, such as 03x2 or 08b1.", metavar="NUMBER")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the table, with every reason, here as well.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="That one test may take.")] = 120.0,
    memory: Annotated[float, typer.Option("--memory", help="GiB that a submission may use.")] = 3.0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Submissions that run at the same time.")] = 1,
) -> None:
    """Run the tests of many submissions, each in processes of its own with limits, and print a table.

    A submission's code can read and delete what you may: grade the work of strangers in a container.
    """
    from tutorial.workshop.grading import grade as judge
    from tutorial.workshop.grading import write_csv
    from tutorial.workshop.hunts import find_hunts, names_a_hunt
    from tutorial.workshop.limits import Limits

    if csv is not None and (csv.is_dir() or not csv.absolute().parent.is_dir()):
        raise ConfigError(f"{csv} cannot be written; name a file in a folder that exists with --csv.")
    hunted = find_hunts(only) if only and names_a_hunt(only) else ()
    if hunted and phase is not None and find_lesson(phase).number != hunted[0].phase:
        raise ConfigError(f"Bug {hunted[0].number} belongs to phase {hunted[0].phase}, not to phase {phase}.")
    wanted = [] if hunted else None if phase is None and only is None else wanted_exercises(phase, only)
    done = 0

    def progress(row: "Row") -> None:
        nonlocal done
        done += 1
        said = f"[{done}/{len(submissions)}] {printable(row.name)}: {row.num_passed} of {len(row.verdicts)} passed"
        typer.echo(said, err=True)

    with working("running the tests"):
        rows = judge(submissions, wanted, hunted, limits=Limits(seconds, memory), jobs=jobs, progress=progress)
    _print_rows(rows)
    if csv is not None:
        write_csv(rows, csv)
        typer.echo(f"wrote {csv}", err=True)


COMMANDS: dict[Callable[..., None], str] = {
    chart: examples("infer workshop chart", "infer workshop chart --out my-ladder"),
    export: examples("infer workshop export 03", "infer workshop export 03 04 05 06 --out serving-day.zip --force"),
    grade: examples(
        "infer workshop grade submissions/*",
        "infer workshop grade --phase 03 --csv grades.csv --jobs 4 ada.zip bob.zip",
        "infer workshop grade --only 03x2 --seconds 30 --memory 2 submissions/*.zip",
        "infer workshop grade --only 08b1 submissions/*",
    ),
}
"""Each command with the epilog of its help."""


def wanted_exercises(phase: str | None, only: str | None) -> list["Exercise"]:
    """The exercises that a command's arguments name: a phase's, or one. ConfigError if they do not fit together."""
    from tutorial.workshop.exercises import exercises_of, find_exercise

    if only is None and phase is not None and "x" in phase.lower():
        phase, only = None, phase
    if only is None:
        assert phase is not None
        return list(exercises_of(find_lesson(phase)))
    exercise = find_exercise(only)
    if phase is not None and (lesson := find_lesson(phase)).number != exercise.phase:
        those = ", ".join(entry.number for entry in lesson.exercises) or "none yet"
        raise ConfigError(
            f"Exercise {exercise.number} belongs to phase {exercise.phase}, not to phase {lesson.number}, whose "
            f"exercises are {those}."
        )
    return [exercise]


def _print_rows(rows: list["Row"]) -> None:
    """The table, totals below it, and then why each exercise did not pass."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    def table(words: bool) -> Table:
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
        made.add_column("submission", footer="passed by", no_wrap=True)
        for index, verdict in enumerate(rows[0].verdicts):
            total = sum(str(row.verdicts[index].outcome) == "passed" for row in rows)
            made.add_column(verdict.exercise.number, footer=f"{total}/{len(rows)}", no_wrap=True)
        made.add_column("passed", justify="right", no_wrap=True)
        for row in rows:
            outcomes = [str(verdict.outcome) for verdict in row.verdicts]
            cells = [Text(said if words else _MARKS[said], _COLOURS.get(said, "dim")) for said in outcomes]
            made.add_row(Text(printable(row.name)), *cells, f"{row.num_passed}/{len(row.verdicts)}")
        return made

    console = stdout_console()
    width = Measurement.get(console, console.options.update(max_width=10_000), table(words=True)).maximum
    if not console.is_terminal:
        Console(highlight=False, emoji=False, width=max(width, PLAIN_WIDTH)).print(table(words=True))
    elif width <= console.width:
        console.print(table(words=True))
    else:
        console.print(table(words=False))
        console.print("  ".join(f"{mark} {said}" for said, mark in _MARKS.items()), style="dim")
    for row in rows:
        said: dict[str, list[str]] = {}
        for verdict in row.verdicts:
            if str(verdict.outcome) in ("failed", "not run"):
                where = f", at {verdict.where}" if verdict.where else ""
                reason = f"{verdict.outcome}: {printable(verdict.reason)[:_MOST_LETTERS]}{printable(where)}"
                said.setdefault(reason, []).append(verdict.exercise.number)
        for reason, numbers in said.items():
            typer.echo(f"{printable(row.name)}  {', '.join(numbers)} {reason}")
