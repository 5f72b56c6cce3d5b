"""``infer bench hardware`` and ``infer bench kernels``: what the machine can do, and how near our kernels come.

Introduced in phase 3.1. The commands only read their options and print; :mod:`benchmarks.hardware`,
:mod:`benchmarks.bench_kernels` and :mod:`benchmarks.kernels.sweep` measure. Invariant: the last line on standard output
is one JSON line; progress goes to standard error.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.cli.terminal import examples, stderr_console, stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.report import Report

HARDWARE_EPILOG = examples("infer bench hardware", "infer bench hardware --device cpu --out reports")
KERNELS_EPILOG = examples(
    "infer bench kernels",
    "infer bench kernels --model qwen3-1.7b --kernel gate_up --kernel head",
    "infer bench kernels --rows 1 --rows 16 --no-compile --out reports",
    "infer bench kernels --sweep --kernel down --out reports",
)
EXIT_WRONG = 1

Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda. Default: the GPU where there is one.", show_default=False)
]
Out = Annotated[Path | None, typer.Option("--out", help="Write the reports, named by machine, into this folder.")]


def hardware(device: Device = None, out: Out = None) -> None:
    """Measure this machine's ceilings: bandwidth of copying and reading, matrix products, the cost of a launch.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.hardware import hardware_report, measure_ceilings
    from benchmarks.report import write_report
    from benchmarks.views.kernels import hardware_markdown, print_hardware
    from shared.cli.terminal import working

    chosen = _device(device)
    with working("measuring the machine"):
        ceilings = measure_ceilings(chosen)
    report = hardware_report(ceilings, chosen)
    console = stdout_console()
    print_hardware(report, ceilings, console)
    if out is not None:
        _say_written(console, write_report(report, out, table=hardware_markdown(report, ceilings)))
    typer.echo("")
    typer.echo(report.line())


def kernels(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="llama-3.2-1b, qwen3-1.7b or gemma-3-1b; repeat it. Default: all three."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", "-k", help="A kernel to measure; repeat it. Default: every kernel.")
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option("--rows", help="Rows of a call, 1 to 16; repeat it. Default: 1, 4, 8 and 16; with --sweep 1."),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Time torch.compile too. Default: on a GPU.", show_default=False),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Replays of each graph, whose median counts; 9, or 3 without a GPU.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try other cuts than the kernels' tables have, on a GPU; no peers.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic inputs.")] = 0,
    device: Device = None,
    out: Out = None,
) -> None:
    """Time every kernel at the decode shapes of real models, beside the memory's ceiling, eager PyTorch and compiled.

    Without a GPU it runs at demo size. Ends with 1 if a kernel's result was wrong. The last line on standard output is
    the result as JSON.
    """
    from benchmarks.bench_kernels import MODELS, measure_kernels

    chosen, models = _device(device), model or list(MODELS)
    if sweep:
        from benchmarks.kernels.sweep import sweep_kernels

        found = sweep_kernels(
            models, device=chosen, kernels=kernel, rows=rows, seed=seed, say=lambda line: typer.echo(line, err=True)
        )
        _print_all(found, out, None, None)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from benchmarks.views.kernels import errors, markdown, print_kernels

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measure the machine", total=None)

        def progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        found = measure_kernels(
            models,
            device=chosen,
            kernels=kernel,
            rows=rows,
            trials=trials,
            compiles=compile,
            seed=seed,
            progress=progress,
        )
        reports = _print_all(found, out, print_kernels, markdown)
    if any(errors(report) for report in reports):
        raise typer.Exit(EXIT_WRONG)


def _print_all(
    found: Any,
    out: Path | None,
    show: "Callable[[Report, Console], None] | None",
    markdown: "Callable[[Report], str] | None",
) -> "list[Report]":
    """Print and write each report as it comes, so that what is measured is kept; last the line of them all."""
    from benchmarks.report import write_report
    from benchmarks.views.kernels_figure import save_figure

    console, reports = stdout_console(), []
    for report in found:
        reports.append(report)
        if show is not None:
            show(report, console)
        if out is not None and markdown is not None:
            table, figure = markdown(report), partial(save_figure, report)
            _say_written(console, write_report(report, out, table=table, figure=figure))
        elif out is not None:
            _say_written(console, write_report(report, out))
        console.print()
    first = reports[0]
    line = {"benchmark": first.name, "machine": first.machine_name, "date": first.date, "flags": first.flags}
    results = {report.model["name"]: report.results for report in reports}
    typer.echo(json.dumps(line | {"models": results}, ensure_ascii=False, allow_nan=False))
    return reports


def _device(asked: str | None) -> str:
    """The device to measure, checked."""
    from shared.loading.placement import check_device

    return str(check_device(asked or "auto"))


def _say_written(console: "Console", paths: list[Path]) -> None:
    for path in paths:
        console.print(f"wrote {path}", style="bright_black", highlight=False, soft_wrap=True)
