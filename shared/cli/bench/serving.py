"""``infer bench serving`` and ``infer bench matrix``: many requests, measured. Introduced in phase 4.

The commands read their options and print; ``benchmarks`` measures. Invariant: the last line on standard output is one
JSON line; progress goes to standard error.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from shared.cli.bench.options import Device, Dtype, Model, Out, Seed, Threads, measuring, present
from shared.cli.options import DEFAULT_MODEL
from shared.terminal import examples

SERVING_EPILOG = examples(
    "infer bench serving",
    "infer bench serving --experiment tail --tail-requests 128",
    "infer bench serving --experiment workloads --contender static --contender continuous",
    "infer bench serving --experiment capacity --experiment whole-step",
    "infer bench serving --experiment long-prompts --trials 1",
    "infer bench serving --model ./llama-1b --device cuda --out reports",
)
MATRIX_EPILOG = examples(
    "infer bench matrix",
    "infer bench matrix --phase 03.1 --phase 04 --phase 05",
    "infer bench matrix --model ./llama-1b --device cuda --max-seconds 10 --out reports",
)


def serving(
    model: Model = DEFAULT_MODEL,
    experiment: Annotated[
        list[str] | None,
        typer.Option(
            "--experiment",
            "-e",
            help="workloads, policies, closed-loop, together, decode, sampled, capacity, whole-step, http-overhead, "
            "tail, pairs, long-prompts, chunk-size or prefixes; repeat it. A report of one bears its name. Default: "
            "all.",
        ),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            "--contender",
            "-c",
            help="sequential, transformers, static, continuous, paged, newest, vllm (where it is installed), http, or "
            "another of the experiments'; repeat it. Default: all.",
        ),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            "--phase", "-p", help=("The last phase that takes part; it also serves over HTTP. Default: the newest.")
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Poisson arrivals at this many requests per second, instead of a closed loop."),
    ] = None,
    tail_requests: Annotated[int | None, typer.Option(help="Requests of the tail; 512, without a GPU 24.")] = None,
    trials: Annotated[
        int | None, typer.Option(help="Trials of interleaved measurements; the median is reported; 3.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Cut a trace short after this many seconds, except over HTTP.")
    ] = None,
    out: Out = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure serving under load: one request at a time, static batches, continuous ones, memory in regions and blocks.

    Ctrl-C stops it; completed experiments are still reported. The last line on standard output is the result as JSON.
    """
    from benchmarks.bench_serving import measure_serving
    from benchmarks.serving.view import view
    from benchmarks.setup import Setup
    from benchmarks.workloads.serving import default_size

    with measuring(device, dtype, threads, seed, model) as where:
        size = default_size(where["device"])
        if tail_requests is not None:
            size = replace(size, tail=replace(size.tail, num_requests=tail_requests))
        if trials is not None:
            size = replace(size, trials=trials)
        report = measure_serving(
            Setup(model, **where),
            experiments=experiment or None,
            contenders=contender or None,
            phase=phase,
            size=size,
            rate=rate,
            max_seconds=max_seconds,
        )
    present(report, view(report), out)


def matrix(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        list[str] | None,
        typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: every phase of the main line."),
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Cut a cell short after this many seconds.")] = 20.0,
    out: Out = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure every phase, in every configuration of its own, on W1, W2 and W3: gains over the plain loop.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.run_matrix import run_matrix, view
    from benchmarks.setup import Setup

    with measuring(device, dtype, threads, seed, model) as where:
        report = run_matrix(Setup(model, **where), phases=phase or None, max_seconds=max_seconds)
    present(report, view(report), out)


COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "serving": (serving, SERVING_EPILOG),
    "matrix": (matrix, MATRIX_EPILOG),
}
