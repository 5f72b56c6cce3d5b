"""``infer roofline``: the minimum time of a model's token, on this machine or another.

Introduced in phase 3.1. The command reads its options and prints; `benchmarks.roofline` does the arithmetic. Invariant:
every figure in the table follows from the figures printed above it, and each ceiling states its source: a measurement,
an option, or a data sheet.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shared.cli import options
from shared.cli.bench.options import Device, computing_device
from shared.errors import ConfigError, RequestError
from shared.terminal import examples, stdout_console, working

if TYPE_CHECKING:
    import torch

    from benchmarks.roofline import DecodeWork, Floor

EPILOG = examples(
    "infer roofline smollm2-135m",
    "infer roofline llama-3.2-1b --gpu h100",
    "infer roofline qwen3-8b --gpu h100 --weight-bits 4.125",
    "infer roofline qwen3-1.7b --bandwidth 900 --flops 70 --dtype bfloat16 --context 4096",
    "infer roofline ./my-model --batch 1,4,64 --json",
)
CONTEXT = 512
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Ceilings:
    """What a machine reads and computes per second, and the source of these rates."""

    kind: Literal["given", "data sheet", "cpu", "cuda"]
    machine: str
    source: str
    read_bytes_per_second: float
    matmul_flops_per_second: float


def roofline(
    model: Annotated[str, typer.Argument(help="A model folder, a known name, a hub name, or a shape: llama-3.2-1b.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens that the new token sees; 512, or the model's maximum.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes in the table, separated by commas. Default: 1 to 1,024.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=("Dtype of weights, keys and values. Default: float32 on a CPU, otherwise the model's.")),
    ] = None,
    weight_bits: Annotated[
        float | None, typer.Option(help="Bits per weight in the blocks' matrices: 8, or 4.125 with one scale per 128.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU's data sheet: h100, h200, a100, l40s, l4, rtx-4090, ...")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Read bandwidth of the memory in GB/s, instead of measuring.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Rate of matrix products in TFLOP/s, instead of measuring.")
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Work out from a model's shape what one token must read and compute, and how long that takes at least.

    The ceilings are measured on this machine in a few seconds, or given, or those of a GPU's data sheet.
    """
    from benchmarks.roofline import DecodeWork, find_config
    from benchmarks.roofline_view import view
    from benchmarks.view import show

    name, config = find_config(model)
    limit = config.max_position_embeddings
    context = min(CONTEXT, limit) if context is None else context
    if not 1 <= context <= limit:
        raise RequestError(f"--context is {context}; {name} holds from 1 to {limit} tokens.")
    batches = _batches(batch)
    ceilings = _ceilings(gpu, bandwidth, flops, device)
    if weight_bits is not None and not 1 <= weight_bits <= 32:
        raise ConfigError(f"--weight-bits is {weight_bits}; it must be a number from 1 to 32.")
    work = DecodeWork(config, _dtype(dtype, config.dtype, ceilings), weight_bits)
    floors = [work.floor(context, *_rates(ceilings), batch=size) for size in batches]
    if as_json:
        typer.echo(json.dumps(_as_json(name, work, context, ceilings, floors)))
    else:
        show(view(name, work, context, ceilings, floors), stdout_console())


def _ceilings(gpu: str | None, bandwidth: float | None, flops: float | None, device: str) -> Ceilings:
    """Given rates take precedence over a data sheet's, and those over measured ones."""
    for option, value in (("--bandwidth", bandwidth), ("--flops", flops)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} is {value}; it must be a positive number.")
    if gpu is not None:
        from benchmarks.hardware import find_data_sheet

        sheet = find_data_sheet(gpu)
        base = Ceilings("data sheet", sheet.title, f"not measured: {sheet.source}", *_rates(sheet))
    elif bandwidth is not None and flops is not None:
        base = Ceilings("given", "a machine", "as given", 0.0, 0.0)
    else:
        from benchmarks.hardware import measure_ceilings
        from benchmarks.machine import machine_title

        device = computing_device(device)
        kind: Literal["cpu", "cuda"] = "cuda" if device.startswith("cuda") else "cpu"
        with working("measuring this machine"):
            base = Ceilings(kind, machine_title(device), "measured now", *_rates(measure_ceilings(device)))
    given = [option for option, value in (("--bandwidth", bandwidth), ("--flops", flops)) if value is not None]
    return replace(
        base,
        source=base.source + (f"; {' and '.join(given)} given" if given and base.kind != "given" else ""),
        read_bytes_per_second=base.read_bytes_per_second if bandwidth is None else bandwidth * 1e9,
        matmul_flops_per_second=base.matmul_flops_per_second if flops is None else flops * 1e12,
    )


def _rates(source: Any) -> tuple[float, float]:
    return source.read_bytes_per_second, source.matmul_flops_per_second


def _dtype(asked: str | None, declared: str, ceilings: Ceilings) -> "torch.dtype":
    """A data sheet's rates are for 16-bit matrices. A CPU computes in fp32, a GPU in the checkpoint's dtype."""
    import torch

    from shared.engine.config import DTYPES

    if asked is not None and asked not in DTYPES:
        raise ConfigError(f"dtype is {asked!r}; it must be one of {', '.join(DTYPES)}.")
    if asked == "float32" and ceilings.kind == "data sheet":
        raise ConfigError(
            "dtype is 'float32' and the data sheets' rates are those of 16-bit products; leave --dtype away, or give "
            "the GPU's rates with --bandwidth and --flops instead of --gpu."
        )
    by_kind = {"cpu": "float32", "data sheet": "float16" if declared == "float16" else "bfloat16"}
    return getattr(torch, asked or by_kind.get(ceilings.kind, declared))


def _batches(text: str | None) -> tuple[int, ...]:
    if text is None:
        return BATCHES
    parts = options.listed(text)
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= 1 << 20 for part in parts):
        raise ConfigError(f"--batch is {text!r}; write whole numbers from 1 on with commas between them, such as 1,8.")
    return tuple(sorted({int(part) for part in parts}))


def _as_json(name: str, work: "DecodeWork", context: int, ceilings: Ceilings, floors: "list[Floor]") -> dict[str, Any]:
    return {
        "model": name,
        "dtype": str(work.dtype).removeprefix("torch."),
        "weight_bits": work.weight_bits,
        "context": context,
        "parameters": {**work.parameters, "total": work.num_parameters},
        "weight_bytes": work.weight_bytes,
        "kv_bytes_per_token": work.kv_bytes_per_token,
        "kv_bytes": work.kv_bytes(context),
        "flops_per_token": work.flops(context),
        "flops_per_byte": work.flops(context) / work.num_bytes(context),
        "ceilings": asdict(ceilings),
        "floors": [
            asdict(floor)
            | {
                "seconds": floor.seconds,
                "tokens_per_second": floor.tokens_per_second,
                "is_memory_bound": floor.is_memory_bound,
            }
            for floor in floors
        ],
        "compute_bound_from_batch": work.turning_batch(context, *_rates(ceilings)),
    }
