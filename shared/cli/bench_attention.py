"""``infer bench attention``: decode attention over paged memory, beside the memory's ceiling. Introduced in phase 6.1.

The command only reads its options and prints; :mod:`benchmarks.bench_attention` and :mod:`benchmarks.attention.sweep`
measure. Invariant: the last line on standard output is one JSON line; progress goes to standard error.
"""

from pathlib import Path
from typing import Annotated

import typer

from shared.cli.bench_options import step_progress, tell_written
from shared.cli.terminal import examples, stdout_console

ATTENTION_EPILOG = examples(
    "infer bench attention",
    "infer bench attention --shape 32x4096 --shape mixed --no-peers",
    "infer bench attention --sweep --out reports",
)
EXIT_WRONG = 1


def attention(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", "-s", help="A shape to measure; repeat it. Default: all.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", "-p", help="A peer to time; repeat it. Default: all that there are.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether to time peers.")] = True,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Replays of each graph, whose median counts; 9, or 3 without a GPU.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try other tilings than the kernel's table has, on a GPU; no peers.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic inputs and the order of blocks.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. Default: the GPU where there is one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the report, named by machine, into this folder.")
    ] = None,
) -> None:
    """Time decode attention over paged memory: our planned kernel, without its parts, and other libraries.

    Without a GPU it runs at demo size. Ends with 1 if a result of ours was wrong. The last line on standard output is
    the result as JSON.
    """
    from benchmarks.report import write_report
    from shared.loading.placement import check_device

    chosen = str(check_device(device or "auto"))
    console = stdout_console()
    if sweep:
        from benchmarks.attention.sweep import sweep_attention

        for report in sweep_attention(shape, device=chosen, seed=seed, say=lambda line: typer.echo(line, err=True)):
            if out is not None:
                tell_written(console, write_report(report, out))
            typer.echo(report.line())
        return
    from benchmarks.bench_attention import measure_attention
    from benchmarks.views.attention import errors, markdown, print_attention

    with step_progress() as progress:
        report = measure_attention(
            shape, device=chosen, peers=peer if peers else (), trials=trials, seed=seed, progress=progress
        )
    print_attention(report, console)
    if out is not None:
        tell_written(console, write_report(report, out, table=markdown(report)))
    typer.echo("")
    typer.echo(report.line())
    if errors(report):
        raise typer.Exit(EXIT_WRONG)
