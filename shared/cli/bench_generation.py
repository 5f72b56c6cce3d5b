"""``infer bench generation``, ``profile`` and ``sanity``: whole answers, measured. Introduced in phase 3.1.

The commands read their options and print; ``benchmarks`` measures. Invariant: the last line on standard output is one
JSON line; progress goes to standard error.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.cli.bench_options import (
    Device,
    Dtype,
    Model,
    Seed,
    Threads,
    computing_device,
    step_progress,
    tell_written,
)
from shared.cli.options import DEFAULT_MODEL, fetch_if_known
from shared.cli.terminal import examples, stdout_console

GENERATION_EPILOG = examples(
    "infer bench generation",
    "infer bench generation --phase 02 --phase 03 --no-transformers",
    "infer bench generation --model ./llama-1b --device cuda --no-compiled --out reports",
)
PROFILE_EPILOG = examples(
    "infer bench profile",
    "infer bench profile --phase 03 --steps 8 --trace trace.json.gz",
    "infer bench profile --model ./llama-1b --device cuda --prompt-tokens 256 --out reports",
)
SANITY_EPILOG = examples(
    "infer bench sanity",
    "infer bench sanity --model ./my-model --phase 03",
    "INFER_TEST_MODELS=./llama,./qwen infer bench sanity --device cuda",
)


def generation(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        list[str] | None,
        typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: 02, 03 and the newest."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", help="Tokens of each prompt; 256, without a GPU 32.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", help="Tokens of each answer; 256, without a GPU 16.")
    ] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Answers of each, whose median counts; 3.")] = None,
    window: Annotated[
        int | None, typer.Option("--window", help="Decode steps to profile; 16, without a GPU 4.")
    ] = None,
    with_transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Measure transformers' generate beside.")
    ] = True,
    with_compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--no-compiled",
            help="And transformers with a static cache, compiled; only on a GPU, where it is the default.",
            show_default=False,
        ),
    ] = None,
    max_seconds: Annotated[
        float,
        typer.Option("--max-seconds", help="Break an answer off after so much decoding; not transformers' compiled."),
    ] = 15.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write JSON, Markdown and PNG, named by machine, into this folder.")
    ] = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Measure one request alone: phases beside transformers, and each beside the limit of the memory.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.bench_generation import default_size, measure_generation
    from benchmarks.report import write_report
    from benchmarks.views.generation import markdown, print_generation
    from benchmarks.views.generation_figure import save_figure

    device = computing_device(device)
    fetch_if_known(model)
    given = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "trials": trials, "window": window}
    with step_progress() as progress:
        report = measure_generation(
            model,
            phases=phase or None,
            size=replace(default_size(device), **{name: value for name, value in given.items() if value is not None}),
            with_transformers=with_transformers,
            with_compiled=with_compiled,
            seed=seed,
            dtype=dtype,
            device=device,
            threads=threads,
            max_seconds=max_seconds,
            progress=progress,
        )
    console = stdout_console()
    print_generation(report, console)
    if out is not None:
        drawn = write_report(report, out, table=markdown(report), figure=lambda path: save_figure(report, path))
        tell_written(console, drawn)
    typer.echo("")
    typer.echo(report.line())


def profile(
    model: Model = DEFAULT_MODEL,
    phase: Annotated[
        str | None, typer.Option("--phase", "-p", help="The phase to profile. Default: the newest of the main line.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", help="Tokens before the profiled steps; 256, without a GPU 32.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Decode steps to profile; 16, without a GPU 4.")] = None,
    top: Annotated[int, typer.Option("--top", help="Rows of the table on the screen.")] = 20,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Write a Chrome trace, for chrome://tracing or ui.perfetto.dev; best as .json.gz."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write JSON and Markdown into this folder.")] = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Show where the time of a decoded token goes: kernels on a GPU, PyTorch's operations on a CPU.

    The last line on standard output is the result as JSON.
    """
    from benchmarks.profile_generation import measure_profile
    from benchmarks.report import write_report
    from benchmarks.views.profile import markdown, print_profile

    device = computing_device(device)
    fetch_if_known(model)
    with step_progress() as progress:
        report = measure_profile(
            model,
            phase=phase,
            prompt_tokens=prompt_tokens,
            steps=steps,
            trace=trace,
            seed=seed,
            dtype=dtype,
            device=device,
            threads=threads,
            progress=progress,
        )
    console = stdout_console()
    print_profile(report, console, top)
    written = [trace] if trace is not None else []
    if out is not None:
        written += write_report(report, out, table=markdown(report))
    tell_written(console, written)
    typer.echo("")
    typer.echo(report.line())


def sanity(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="A model to check; repeat it. Default: every one at hand, and made shapes."),
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", "-p", help="A phase to check; repeat it. Default: all that generate.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="A shape to make and check; repeat it. Default: tiny ones, on a GPU real ones."),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens of each answer.")] = 12,
    out: Annotated[Path | None, typer.Option("--out", help="Write JSON and Markdown into this folder.")] = None,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Check that every model at hand loads, answers, and agrees with transformers in every phase; a table.

    Models: those that were fetched, the folders that INFER_TEST_MODELS names, and shapes made here. The exit code is 1
    if anything failed. The last line on standard output is the result as JSON.
    """
    from benchmarks.report import write_report
    from benchmarks.sanity_check import check_models
    from benchmarks.views.sanity import markdown, print_sanity

    device = computing_device(device)
    with step_progress() as progress:
        report = check_models(
            models=model or None,
            phases=phase or None,
            shapes=shape or None,
            new_tokens=new_tokens,
            seed=seed,
            dtype=dtype,
            device=device,
            threads=threads,
            progress=progress,
        )
    console = stdout_console()
    print_sanity(report, console)
    if out is not None:
        tell_written(console, write_report(report, out, table=markdown(report)))
    typer.echo("")
    typer.echo(report.line())
    if report.results["num_failed"]:
        raise typer.Exit(1)


COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "generation": (generation, GENERATION_EPILOG),
    "profile": (profile, PROFILE_EPILOG),
    "sanity": (sanity, SANITY_EPILOG),
}
