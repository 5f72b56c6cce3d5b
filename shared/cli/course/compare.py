"""``infer compare``: compare a model's activations with transformers. Introduced in phase 1b.

Invariant: exit code 0 means that every module agreed within its bound, 1 that one did not.
"""

import json
import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.errors import ConfigError, InferError
from shared.terminal import examples, fetch_if_known, stdout_console, working

if TYPE_CHECKING:
    from shared.parity.compare import Comparison, ModuleDiff

EPILOG = examples(
    "infer compare smollm2-135m",
    'infer compare ./my-model --prompt "Once upon a time" --dtype bfloat16',
    "infer compare smollm2-135m --layers 0,9-11 --full",
    "infer compare smollm2-135m --json > comparison.json",
)
DEFAULT_PROMPT = "The steam engine was invented long before the railway, to pump water out of mines."
EXIT_DIFFERS = 1
FREE_RUN = "own states"  # the heading of the drift column: the error when our model runs on its own states


def compare(
    model: Annotated[str, typer.Argument(help="A model folder, a known name, or a hub name owner/name.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt of both models.")] = DEFAULT_PROMPT,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, for both.")] = "float32",
    layers: Annotated[str | None, typer.Option(help="Such as 0,3 or 8-11; default: all.", show_default=False)] = None,
    attention_backend: Annotated[str, typer.Option(help="naive (the formula) or sdpa (PyTorch), for both.")] = "sdpa",
    full: Annotated[bool, typer.Option("--full", help="A row for each module instead of each layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare the activations of every layer with transformers, and mark the first that differs."""
    comparison = _compare(model, prompt, dtype, layers, attention_backend)
    if as_json:
        asked = {"model": model, "prompt": prompt, "dtype": dtype, "attention_backend": attention_backend}
        typer.echo(json.dumps(asked | to_json(comparison)))
    else:
        _show(comparison, full)
    if comparison.first_over is not None:
        raise typer.Exit(EXIT_DIFFERS)


def parse_layers(text: str) -> list[int]:
    """``0,3,8-11`` as [0, 3, 8, 9, 10, 11]; raises ConfigError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or len(part) > 9:
            raise ConfigError(f"layers is {text!r}; write numbers and ranges of layers such as 0,3,8-11.")
        bounds = int(first), int(last or first)
        if bounds[1] < bounds[0] or bounds[1] >= bounds[0] + 1024:
            raise ConfigError(f"layers holds {part.strip()!r}; a range goes from a layer to a later one, such as 8-11.")
        found.update(range(bounds[0], bounds[1] + 1))
    return sorted(found)


def to_json(comparison: "Comparison") -> dict[str, Any]:
    """The comparison as JSON values; numbers that are not finite become null."""
    first = comparison.first_over
    return {
        "first_over": None if first is None else {"layer": first.layer, "module": first.name},
        "modules": [
            {
                "layer": diff.layer,
                "module": diff.name,
                "relative_error": _finite(diff.distance.relative),
                "max_error": _finite(diff.distance.maximum),
                "limit": diff.limit,
                "is_over": diff.is_over,
            }
            for diff in comparison.modules
        ],
        "drift": [
            {"layer": layer, "relative_error": _finite(drift.relative), "max_error": _finite(drift.maximum)}
            for layer, drift in comparison.drift.items()
        ],
    }


def _compare(name: str, prompt: str, dtype_name: str, layers: str | None, attention_backend: str) -> "Comparison":
    from shared.engine.config import EngineConfig

    config = EngineConfig(model=name, dtype=dtype_name, attention_backend=attention_backend)
    config.check({"model", "dtype", "attention_backend"})
    chosen = None if layers is None else parse_layers(layers)
    fetch_if_known(name)

    from shared.engine.prompt import check_prompt
    from shared.loading.loader import load_model
    from shared.loading.resolve import resolve_model
    from shared.parity.compare import check_layers, compare_models
    from shared.parity.reference import load_reference
    from shared.text.tokenizer import Tokenizer

    with working(f"loading {name}"):
        folder = resolve_model(name)
        model = load_model(folder, dtype=config.torch_dtype)
        ids = check_prompt(Tokenizer.load(folder).encode(prompt), model.config.vocab_size, model.max_positions)
        checked = check_layers(chosen, model.config.num_layers)
    with working(f"loading {name} in transformers"):
        try:
            reference = load_reference(folder, model.dtype, attention_backend)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise InferError(
                f"transformers cannot load {folder} ({reason}), so there is no reference to compare with; check the "
                "folder with `AutoModelForCausalLM.from_pretrained`."
            ) from error
    with working("comparing"):
        return compare_models(model, reference, ids, layers=checked, attention_backend=attention_backend)


def _show(comparison: "Comparison", full: bool) -> None:
    from rich import box
    from rich.table import Table

    first = comparison.first_over
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right", style="bold cyan")
    table.add_column("module" if full else "worst module")
    for heading in ("relative", "limit", "max abs", FREE_RUN):
        table.add_column(heading, justify="right")
    table.add_column("")
    rows = comparison.modules if full else _worst_of_layers(comparison)
    for diff, after in zip_longest(rows, rows[1:]):
        is_last = after is None or after.layer != diff.layer  # the row for the whole layer's output
        drift = comparison.drift[diff.layer].relative if diff.layer is not None and is_last else None
        table.add_row(
            "" if diff.layer is None else str(diff.layer),
            diff.name,
            f"{diff.distance.relative:.1e}",
            f"{diff.limit:.1e}",
            f"{diff.distance.maximum:.1e}",
            "" if drift is None else f"{drift:.1e}",
            _verdict(diff, first),
            style="red" if diff.is_over else "",
        )
    console = stdout_console()
    console.print(table)
    console.print(
        "relative: rms of the difference over rms of the reference, worst token; each layer starts from the "
        f"reference's states. {FREE_RUN}: the same after the layer when ours runs on its own states. max abs: "
        "largest difference of an element.",
        style="dim",
    )
    over = sum(diff.is_over for diff in comparison.modules)
    if first is None:
        console.print(f"All {len(comparison.modules)} modules agree within their limits.", style="green")
    else:
        console.print(f"{over} of {len(comparison.modules)} modules over their limit, first {first.path}.", style="red")


def _worst_of_layers(comparison: "Comparison") -> "list[ModuleDiff]":
    """One difference per layer: the first over its limit, or else the largest error; modules outside the layers are
    unchanged."""
    rows: dict[Any, list[ModuleDiff]] = {}
    for diff in comparison.modules:
        rows.setdefault(diff.name if diff.layer is None else diff.layer, []).append(diff)
    return [
        next((diff for diff in diffs if diff.is_over), max(diffs, key=lambda diff: diff.distance.relative))
        for diffs in rows.values()
    ]


def _verdict(diff: "ModuleDiff", first: "ModuleDiff | None") -> str:
    if not diff.is_over:
        return ""
    return "<- first over" if diff is first else "over"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
