"""``infer bench grammar``: what grammars cost. Introduced in phase 12.

The command only reads its options and prints; :mod:`benchmarks.grammar` measures. Invariant: the last line on standard
output is one JSON line; progress goes to standard error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.bench.options import Device, Model, Seed, computing_device, present
from shared.terminal import examples, working


def grammar(
    model: Model = "smollm2-135m",
    requests: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 64,
    steps: Annotated[int, typer.Option(help="Steps that are timed.", min=1)] = 150,
    trials: Annotated[int, typer.Option(help="Trials of each case; the median is reported.", min=1)] = 5,
    seed: Seed = 0,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the report into this folder.")] = None,
) -> None:
    """Time requests with and without a grammar, and on a GPU the launches that find masks.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.grammar import measure_grammars, view

    where = computing_device(device)
    with working("decoding with and without grammars"):
        report = measure_grammars(model, device=where, num_requests=requests, num_steps=steps, trials=trials, seed=seed)
    present(report, view(report), out)


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "grammar": (grammar, examples("infer bench grammar --requests 4 --steps 20"))
}
