"""``infer ladder``: how fast each phase decodes on this machine. Introduced in phase 3.

The command only reads its options and prints; `benchmarks.ladder` measures. Invariant: the last line on standard output
is one JSON line; progress goes to standard error.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.bench_options import Device, computing_device
from shared.cli.options import DEFAULT_MODEL, fetch_if_known
from shared.cli.terminal import examples, stderr_console, stdout_console
from shared.errors import ConfigError

EPILOG = examples(
    "infer ladder",
    "infer ladder --quick",
    "infer ladder --phase 02 --phase 03 --prompt-tokens 256 --new-tokens 32",
    "infer ladder --model ./my-model --contexts 64,512 --out reports",
)


def ladder(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="A model folder, a known name, or a hub name owner/name.", envvar="INFER_MODEL"
        ),
    ] = DEFAULT_MODEL,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", help="Tokens of each prompt; 64, or 32 with --quick.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", help="Tokens of each answer; 16, or 12 with --quick.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Answers of each phase, whose median counts; 3, or 1 with --quick.")
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option("--phase", "-p", help="A phase to measure; repeat it. Default: every phase.")
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            help="Context lengths of the cost curve, with commas. Default: 16,32,64,128,256,512; none with --quick.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write JSON, Markdown and PNG, named by machine, into this folder.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads of PyTorch. Default: as it chooses.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: by device.")
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the synthetic prompts.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of half a minute: less of everything.")
    ] = False,
) -> None:
    """Let every phase answer the same prompts on this machine, in turns, and draw how fast it decodes.

    The last line on standard output is the result as JSON.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from benchmarks.ladder import DEFAULT, QUICK, measure_ladder
    from benchmarks.report import write_report
    from benchmarks.views.ladder import markdown, print_ladder

    fetch_if_known(model)
    size = QUICK if quick else DEFAULT
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("look at the model", total=None)

        def progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        report = measure_ladder(
            model,
            prompt_tokens=size.prompt_tokens if prompt_tokens is None else prompt_tokens,
            new_tokens=size.new_tokens if new_tokens is None else new_tokens,
            trials=size.trials if trials is None else trials,
            phases=phase or None,
            context_lengths=size.context_lengths if contexts is None else _lengths(contexts),
            seed=seed,
            dtype=dtype,
            device=computing_device(device),
            threads=threads,
            progress=progress,
        )
    console = stdout_console()
    print_ladder(report, console)
    if out is not None:
        from benchmarks.views.ladder_figure import save_figure

        paths = write_report(report, out, table=markdown(report), figure=lambda path: save_figure(report, path))
        console.print()
        for path in paths:
            console.print(f"wrote {path}", style="bright_black", highlight=False, soft_wrap=True)
    typer.echo("")
    typer.echo(report.line())


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(
            f"--contexts is {text!r}; it must be whole numbers with commas between them, such as 64,512."
        ) from None
