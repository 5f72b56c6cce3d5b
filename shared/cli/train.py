"""``infer train``: train components that make a model faster. Introduced in phase 11.1."""

from pathlib import Path
from typing import Annotated, Any

import typer

from shared.errors import ConfigError
from shared.terminal import examples

TRAIN_EPILOG = examples(
    "infer train mtp smollm2-135m --out adapters/smollm2-135m --device cuda --minutes 9",
    "infer train mtp smollm2-135m --out /tmp/adapter --prompts 8 --max-tokens 48 --rows 2 --anchors 8 --steps 20",
)

app = typer.Typer(help="Train components that make a model faster.", no_args_is_help=True, epilog=TRAIN_EPILOG)


@app.callback()
def _group() -> None:
    """Train components that make a model faster."""


@app.command("mtp", epilog=TRAIN_EPILOG)
def mtp(
    model: Annotated[str, typer.Argument(help="A model folder, a known name, or a hub name owner/name.")],
    out: Annotated[Path, typer.Option(help="The folder of the adapter.")],
    masks: Annotated[int, typer.Option(min=1, help="Number of tokens guessed ahead.")] = 3,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the additions to the matrices.")] = 16,
    alpha: Annotated[float, typer.Option(help="The additions are scaled by alpha / rank.")] = 32.0,
    target: Annotated[list[str] | None, typer.Option(help="A matrix that gets an addition; default: all four.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Maximum steps.")] = 10_000,
    minutes: Annotated[
        float | None, typer.Option(help=("Maximum minutes of training, not counting the generation of texts."))
    ] = None,
    pause_after: Annotated[
        float | None, typer.Option(help="Minutes after which the run pauses; the same command resumes it.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts that the model answers.")] = 6000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 224,
    length: Annotated[int, typer.Option(min=8, help="Tokens per row of text.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Number of answers generated at a time.")] = 256,
    rows: Annotated[int, typer.Option(min=1, help="Rows per training step.")] = 32,
    anchors: Annotated[int, typer.Option(min=1, help="Positions per row after which masks are placed.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Maximum learning rate of AdamW.")] = 1e-3,
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 500,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the model: float32 or bfloat16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of texts, adapter and steps.")] = 0,
) -> None:
    """Train an adapter that lets a model draft for itself, on texts that the model generates; print its folder.

    The texts and a checkpoint are kept in OUT.training, so that the same command resumes an interrupted run.
    """
    from shared.tracks.multi_token.adapter import AdapterConfig
    from shared.tracks.multi_token.lora import TARGETS
    from shared.tracks.multi_token.training.distillation import TrainingConfig
    from shared.tracks.multi_token.training.run import train_adapter

    try:
        shape = AdapterConfig(rank, alpha, tuple(target or TARGETS), masks)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    training = TrainingConfig(steps, minutes, rows, anchors, learning_rate, seed, measure_every)
    writing: dict[str, Any] = {"num_prompts": prompts, "length": length, "max_new_tokens": max_tokens, "seed": seed}

    def report(line: str) -> None:
        typer.echo(line, err=True)

    is_done = train_adapter(
        model, out.expanduser(), shape, training, writing, batch, dtype, device, pause_after, report=report
    )
    if is_done:
        typer.echo(out)
