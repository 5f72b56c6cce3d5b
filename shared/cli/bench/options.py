"""What the commands of ``infer bench`` that measure answers share: options, progress, and the list of files written.

Introduced in phase 3.1.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.terminal import fetch_if_known, stderr_console, stdout_console

if TYPE_CHECKING:
    from benchmarks.report import Report
    from benchmarks.view import View
    from shared.checkpoints.progress import Progress

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A model folder, a known name, or a hub name owner/name.", envvar="INFER_MODEL"),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", envvar="INFER_DEVICE", help="cpu, cuda, or auto: a GPU if there is one that can run the kernels."
    ),
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: by device.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads of PyTorch. Default: PyTorch's choice.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Write JSON, Markdown and PNG, named by machine, into this folder.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the synthetic prompts.")]


def computing_device(asked: str) -> str:
    """The requested device, checked; ``auto`` is a GPU that can run the kernels, otherwise the CPU."""
    from shared.loading.placement import check_device

    return str(check_device(asked))


SECONDS_PER_LINE = 2.0


@contextmanager
def step_progress() -> "Iterator[Progress]":
    """Shows named and counted steps on standard error: a bar on a terminal, otherwise a line every few seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    is_terminal, told = sys.stderr.isatty(), -SECONDS_PER_LINE
    # Redrawn rarely, since redrawing overlaps with measurements.
    with Progress(
        *columns, console=stderr_console(), transient=True, disable=not is_terminal, refresh_per_second=1
    ) as bar:
        task = bar.add_task("look at the model", total=None)

        def report(text: str, done: int, total: int) -> None:
            nonlocal told
            bar.update(task, description=text, completed=done, total=total)
            if not is_terminal and time.monotonic() - told >= SECONDS_PER_LINE:
                told = time.monotonic()
                typer.echo(f"{done} of {total}: {text}", err=True)

        yield report


@contextmanager
def measuring(
    device: str, dtype: str | None, threads: int | None, seed: int, model: str | None = None
) -> "Iterator[dict[str, Any]]":
    """The setup of a benchmark, as `benchmarks.setup.Setup` takes it, with a bar of its steps; a known model is fetched
    first.
    """
    device = computing_device(device)
    if model is not None:
        fetch_if_known(model)
    with step_progress() as progress:
        yield {"device": device, "dtype": dtype, "threads": threads, "seed": seed, "progress": progress}


def present(report: "Report", view: "View", out: Path | None = None, written: Sequence[Path] = ()) -> None:
    """See :func:`benchmarks.command.present`."""
    from benchmarks.command import present

    present(report, view, out, stdout_console(), written)
