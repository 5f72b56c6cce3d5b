"""``infer ladder``: what each phase gains on this machine. Introduced in phase 3.

The command only reads its options and prints; `benchmarks.ladder` measures. Invariant: the last line on standard output
is one JSON line; progress goes to standard error.
"""

from typing import Annotated

import typer

from shared.cli.bench.options import Device, Dtype, Model, Out, Seed, Threads, measuring, present
from shared.cli.options import DEFAULT_MODEL
from shared.terminal import examples

EPILOG = examples(
    "infer ladder",
    "infer ladder --quick",
    "infer ladder --phase 03 --phase 05",
    "infer ladder --model ./my-model --out reports",
)


def ladder(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: every phase.")
    ] = None,
    out: Out = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Time only four phases, and count the others.")] = False,
) -> None:
    """Compare each phase with the previous one, in the quantity that it is about. Idle, it takes three minutes.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.ladder import measure_ladder, view

    with measuring(device, dtype, threads, seed, model) as where:
        report = measure_ladder(model, phases=phase or None, is_quick=quick, **where)
    present(report, view(report), out)
