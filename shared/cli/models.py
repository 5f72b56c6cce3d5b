"""``infer model``: fetch, list and make checkpoints. Introduced in phase 1b."""

from pathlib import Path
from typing import Annotated

import typer

from shared.cli.options import DEFAULT_MODEL
from shared.terminal import byte_progress, examples, stdout_console

LIST_EPILOG = examples("infer model list")
PULL_EPILOG = examples(
    "infer model pull smollm2-135m", "INFER_CACHE=/data/models infer model pull smollm2-135m --force"
)
MAKE_EPILOG = examples(
    "infer model make --shape tiny-qwen3 /tmp/tiny",
    "infer model make --shape llama-3.2-1b --dtype bfloat16 --device cuda --seed 1 /tmp/llama",
)
QUANTIZE_EPILOG = examples(
    "infer model quantize smollm2-135m /tmp/int8 --method int8",
    "infer model quantize /data/llama /data/llama-int4 --method int4 --quantize-head",
    "infer model quantize smollm2-135m /tmp/gptq --method gptq --text notes.txt",
)

app = typer.Typer(
    help="Fetch, list and make model folders.",
    no_args_is_help=True,
    epilog=examples("infer model list", "infer model pull smollm2-135m", "infer model make --shape tiny-llama DIR"),
)


@app.command("list", epilog=LIST_EPILOG)
def list_known() -> None:
    """List the models that can be fetched, with their folders, and the shapes that can be made."""
    from rich import box
    from rich.table import Table

    from shared.checkpoints.demo import list_models
    from shared.checkpoints.shapes import SHAPES

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", style="bold cyan", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("folder", overflow="fold")
    table.add_column("source")
    for row in list_models():
        size = f"{row.num_bytes / 1e6:.0f} MB" if row.folder else "-"
        folder = str(row.folder) if row.folder else f"not fetched: infer model pull {row.name}"
        table.add_row(row.name, size, folder, row.source)
    console = stdout_console()
    console.print(table)
    console.print("Shapes for `infer model make`: " + ", ".join(SHAPES), soft_wrap=True)


@app.command("pull", epilog=PULL_EPILOG)
def pull(
    name: Annotated[str, typer.Argument(help="A name from `infer model list`.")] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Fetch the model again even if it is in the cache.")] = False,
) -> None:
    """Fetch a model into the cache folder, check it, and print its folder."""
    from shared.checkpoints.demo import pull_demo_model

    with byte_progress() as progress:
        folder = pull_demo_model(name, progress=progress, force=force)
    typer.echo(folder)


@app.command("make", epilog=MAKE_EPILOG)
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    shape: Annotated[str, typer.Option(help="A shape from `infer model list`.")],
    seed: Annotated[int, typer.Option(help="The same seed makes the same weights.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the shape's.")] = None,
    device: Annotated[str, typer.Option(help="The device that generates the values: cpu or cuda.")] = "cpu",
) -> None:
    """Write a random checkpoint of a given shape, with config and tokenizer, and print its folder."""
    from shared.checkpoints.make import make_checkpoint

    with byte_progress() as progress:
        made = make_checkpoint(shape, folder.expanduser(), seed=seed, dtype=dtype, device=device, progress=progress)
    typer.echo(made)


@app.command("quantize", epilog=QUANTIZE_EPILOG)
def quantize(
    model: Annotated[str, typer.Argument(help="A model folder, a known name, or a hub name owner/name.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    method: Annotated[str, typer.Option(help="fp8, int8, int4, or gptq: INT4, corrected.")] = "int8",
    quantize_head: Annotated[bool, typer.Option("--quantize-head", help="Quantize the output head too.")] = False,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="For gptq: a text on which errors are corrected.")
    ] = None,
) -> None:
    """Round a model's matrices to 8 or 4 bits, write a compressed-tensors checkpoint, and print its folder."""
    from shared.checkpoints.quantize import quantize_checkpoint

    with byte_progress() as progress:
        written = quantize_checkpoint(model, folder.expanduser(), method, quantize_head, progress, text)
    typer.echo(written)
