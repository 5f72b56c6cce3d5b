"""Replaces a model's projections by quantized ones, from a quantized or a plain checkpoint.

Introduced in phase 10. Invariant: memory holds the quantized matrices and a few plain ones, never all of them.
"""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from shared.errors import ConfigError, ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.loading.loader import Quantize
from shared.loading.placement import check_memory
from shared.loading.sources import Source
from shared.loading.weights import WORKERS
from shared.models.causal_lm import CausalLM
from shared.models.mlp import GatedMLP
from shared.models.projection import Projection
from shared.models.quantized import QuantizedMLP, QuantizedProjection
from shared.quantization.formats.detect import detect_format
from shared.quantization.rounding import quantize
from shared.quantization.weight import QuantizedWeight

# Tensors that a format may have besides a module's weight: activation scales are not used, and the format's reader
# checks the rest.
PARTS = (
    "weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
    "input_scale", "activation_scale", "output_scale", "input_zero_point", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip


def quantization_config(checkpoint: Checkpoint) -> Any:
    """The ``quantization_config`` of a checkpoint whose config.json has been read; None: it is not quantized."""
    return json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")


class WeightShard(Protocol):
    """Which part of each quantized matrix the model has (phase 12.1)."""

    def whole(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the whole matrix ``name`` of which the model has ``shape``."""
        ...

    def part(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """The model's part of a whole matrix."""
        ...


def quantizer(
    quantization: str | None = None, quantize_head: bool = False, shard: WeightShard | None = None
) -> Quantize:
    """The function that ``load_model`` takes as ``quantize``.

    Args:
        quantization: ``fp8``, ``int8`` or ``int4`` rounds the matrices of a plain checkpoint; None: as stored.
        quantize_head: whether ``quantization`` applies to the head too; an embedding tied to it is not quantized.
        shard: the shard that the model has; None: everything.
    """
    return functools.partial(place_quantized, quantization=quantization, quantize_head=quantize_head, shard=shard)


def place_quantized(
    model: CausalLM,
    source_of: dict[str, Source],
    checkpoint: Checkpoint,
    device: torch.device,
    quantization: str | None,
    quantize_head: bool,
    shard: WeightShard | None = None,
) -> set[str]:
    """Replace the quantized projections of an empty model, and return the names of the tensors they were read from.

    ``source_of``: what forms each parameter of the model; the others as for :func:`quantizer`.
    """
    config = quantization_config(checkpoint)
    if config is None and quantization is None:
        return set()
    if config is not None and quantization is not None:
        raise ConfigError(
            f"quantization is {quantization!r} and the checkpoint in {checkpoint.folder} is quantized already; leave "
            "quantization out."
        )
    stored = None if config is None else detect_format(config, checkpoint)
    projections = {name: module for name, module in model.named_modules() if isinstance(module, Projection)}
    tensors = {name: source_of[f"{name}.weight"].names for name in projections}
    stored_as = {name: names[0].removesuffix(".weight") for name, names in tensors.items()}
    if stored is not None:
        plain = {"head"} if model.config.tie_word_embeddings else set()
        chosen = [name for name in projections if name not in plain and stored.quantizes(stored_as[name])]
        for name in chosen:
            if source_of[f"{name}.weight"].tensor is None:
                raise ModelFolderError(
                    f"{checkpoint.folder} has {stored_as[name]} quantized, and {name} is not this tensor as a whole; "
                    "use a checkpoint of 16 bits, which `quantization` rounds while it loads."
                )
    else:
        chosen = [name for name in projections if name != "head" or quantize_head]

    def place(name: str) -> None:
        projection = projections[name]
        rows, columns = projection.weight.shape
        if stored is not None:
            shape = (rows, columns) if shard is None else shard.whole(name, (rows, columns))
            weight = stored.read(stored_as[name], shape).to(device)
        else:
            weight = quantize(source_of[f"{name}.weight"].read(checkpoint).to(device), quantization or "")
        if shard is not None:
            weight = shard.part(name, weight).to(device)
        model.set_submodule(name, QuantizedProjection(projection, weight))

    if stored is not None:
        used = {f"{stored_as[name]}.{part}" for name in chosen for part in PARTS} & checkpoint.names
        num_bytes = sum(checkpoint.tensor(name).nbytes for name in used)  # mapped, not read
    else:
        used = {tensor for name in chosen for tensor in tensors[name]}
        num_bytes = sum(projections[name].weight.numel() for name in chosen) * (4 if quantization == "int4" else 8) // 8
    check_memory(num_bytes, device, "The quantized part of the model")
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(place, chosen))
    for block in model.blocks:
        if isinstance(block.mlp, GatedMLP):
            block.mlp = QuantizedMLP(block.mlp)
    return used
