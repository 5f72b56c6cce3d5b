"""``infer ladder``: the speed of each phase on this machine. Introduced in phase 3.

The command only reads its options and prints; `benchmarks.ladder` measures. Invariant: the last line on standard output
is one JSON line; progress goes to standard error.
"""

from typing import Annotated

import typer

from shared.cli.bench.options import Device, Dtype, Model, Out, Seed, Threads, measuring, present
from shared.cli.options import DEFAULT_MODEL, listed
from shared.errors import ConfigError
from shared.terminal import examples

EPILOG = examples(
    "infer ladder",
    "infer ladder --quick",
    "infer ladder --phase 02 --phase 03 --prompt-tokens 256 --new-tokens 32",
    "infer ladder --model ./my-model --contexts 64,512 --out reports",
)


def ladder(
    model: Model = DEFAULT_MODEL,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each prompt; 64, or 32 with --quick.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens of each answer; 16, or 12 with --quick.")] = None,
    trials: Annotated[
        int | None, typer.Option(help="Answers of each phase, whose median counts; 3, or 1 with --quick.")
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: every phase.")
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Context lengths of the cost curve, with commas. Default: 16,32,64,128,256,512; none with --quick."
        ),
    ] = None,
    out: Out = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Take a minute or two: less, and no curve.")] = False,
) -> None:
    """Measure each phase on this machine with one request and with 16 at a time, and show its gain.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.ladder import DEFAULT, QUICK, measure_ladder, view

    size = QUICK if quick else DEFAULT
    with measuring(device, dtype, threads, seed, model) as where:
        report = measure_ladder(
            model,
            prompt_tokens=size.prompt_tokens if prompt_tokens is None else prompt_tokens,
            new_tokens=size.new_tokens if new_tokens is None else new_tokens,
            trials=size.trials if trials is None else trials,
            phases=phase or None,
            context_lengths=size.context_lengths if contexts is None else _lengths(contexts),
            **where,
        )
    present(report, view(report), out)


def _lengths(text: str) -> list[int]:
    try:
        return list(map(int, listed(text)))
    except ValueError:
        raise ConfigError(
            f"--contexts is {text!r}; it must be whole numbers with commas between them, such as 64,512."
        ) from None
