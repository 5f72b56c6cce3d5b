"""``infer bench hardware``, ``kernels`` and ``attention``: what the machine can do, and how close our kernels come to
it.

Introduced in phase 3.1. The commands only read their options and print; :mod:`benchmarks.hardware` and
:mod:`benchmarks.bench_kernels` measure. Invariant: the last line on standard output is one JSON line; progress goes to
standard error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.cli.bench.options import Device, computing_device, present, step_progress
from shared.terminal import examples, working

if TYPE_CHECKING:
    from benchmarks.report import Report

EXIT_WRONG = 1

Out = Annotated[Path | None, typer.Option("--out", help="Write the report, named by machine, into this folder.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the synthetic inputs and of the order of blocks.")]


def hardware(device: Device = "auto", out: Out = None) -> None:
    """Measure this machine's ceilings: bandwidth of copying and reading, matrix products, the cost of a launch.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.hardware import hardware_report, view

    with working("measuring the machine"):
        report = hardware_report(computing_device(device))
    present(report, view(report), out)


def kernels(
    model: Annotated[
        str, typer.Option("--model", "-m", help="llama-3.2-1b, qwen3-1.7b or gemma-3-1b.")
    ] = "llama-3.2-1b",
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", "-k", help="A kernel to measure; repeat it. Default: every kernel.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows per call, 1 to 64; repeat it. Default: 1, 4, 8 and 16.")
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Time torch.compile too. Default: on a GPU.", show_default=False),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time every kernel at a real model's decode shapes, next to the memory ceiling and eager and compiled PyTorch.

    Without a GPU it runs at demo size. Exits with 1 if one of our results was wrong. The last line on standard output
    is the result as JSON.
    """
    from benchmarks.bench_kernels import measure_kernels

    where = computing_device(device)
    with step_progress() as progress:
        report = measure_kernels(
            model, device=where, kernels=kernel, rows=rows, compiles=compile, seed=seed, progress=progress
        )
    _present_kernels(report, out)


def attention(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", "-s", help="A shape to measure; repeat it. Default: all.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", "-p", help=("A peer to time; repeat it. Default: all that are available.")),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Whether to time peers.")] = True,
    mistakes: Annotated[
        bool, typer.Option("--mistakes", help="Instead, time three mistakes that make a captured kernel slow.")
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time decode attention over a paged KV cache: our planned kernel, without its parts, FlashInfer and PyTorch.

    Without a GPU it runs at demo size. Exits with 1 if one of our results was wrong. The last line on standard output
    is the result as JSON.
    """
    from benchmarks.bench_kernels import measure_attention

    where = computing_device(device)
    with step_progress() as progress:
        report = measure_attention(
            shape, device=where, peers=peer if peers else (), mistakes=mistakes, seed=seed, progress=progress
        )
    _present_kernels(report, out)


def _present_kernels(report: "Report", out: Path | None) -> None:
    """Print and write a report of kernels; the exit code is 1 if one of our results was wrong."""
    from benchmarks.kernels.view import errors, view

    present(report, view(report), out)
    if errors(report):
        raise typer.Exit(EXIT_WRONG)


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "hardware": (hardware, examples("infer bench hardware", "infer bench hardware --device cpu --out reports")),
    "kernels": (
        kernels,
        examples(
            "infer bench kernels",
            "infer bench kernels --model qwen3-1.7b --kernel gate_up --kernel head",
            "infer bench kernels --rows 1 --rows 16 --no-compile --out reports",
        ),
    ),
    "attention": (
        attention,
        examples(
            "infer bench attention",
            "infer bench attention --shape 32x4096 --shape mixed --no-peers",
            "infer bench attention --mistakes --device cuda --out reports",
        ),
    ),
}
