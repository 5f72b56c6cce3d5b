"""Puts quantized projections in the place of a model's, from a quantized checkpoint or a plain one.

Introduced in phase 10. Invariant: memory holds the quantized matrices and a few plain ones, never all of them.
"""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from shared.errors import ConfigError
from shared.loading.checkpoint import Checkpoint
from shared.loading.loader import Quantize
from shared.loading.placement import check_room
from shared.loading.weights import WORKERS
from shared.models.causal_lm import CausalLM
from shared.models.projection import Projection
from shared.models.quantized import QuantizedProjection
from shared.quantization.formats.detect import detect_format
from shared.quantization.rounding import quantize
from shared.quantization.weight import QuantizedWeight

# What a format may have beside the weight of a module: scales of activations are not used, and the rest is checked by
# the format's reader.
PARTS = (
    "weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
    "input_scale", "activation_scale", "output_scale", "input_zero_point", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip


def quantization_config(checkpoint: Checkpoint) -> Any:
    """The ``quantization_config`` of a checkpoint whose config.json was read before; None: it is not quantized."""
    return json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")


class WeightCut(Protocol):
    """Which part of each quantized matrix the model has (phase 12.1)."""

    def whole(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """The shape of the whole matrix ``name`` of which the model has ``shape``."""
        ...

    def part(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """The model's part of a whole matrix."""
        ...


def quantizer(quantization: str | None = None, quantize_head: bool = False, cut: WeightCut | None = None) -> Quantize:
    """What ``load_model`` takes as ``quantize``.

    Args:
        quantization: ``fp8``, ``int8`` or ``int4`` rounds the matrices of a plain checkpoint; None: as stored.
        quantize_head: whether ``quantization`` is for the head too; the embedding that it may be tied to stays.
        cut: the part that the model has; None: all.
    """
    return functools.partial(place_quantized, quantization=quantization, quantize_head=quantize_head, cut=cut)


def place_quantized(
    model: CausalLM,
    tensor_of: dict[str, str],
    checkpoint: Checkpoint,
    device: torch.device,
    quantization: str | None,
    quantize_head: bool,
    cut: WeightCut | None = None,
) -> set[str]:
    """Replace the quantized projections of an empty model, and return the names of the tensors they were read from.

    ``tensor_of``: the checkpoint's tensor for each parameter of the model; the others as of :func:`quantizer`.
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
    source_of = {name: tensor_of[f"{name}.weight"].removesuffix(".weight") for name in projections}
    if stored is not None:
        plain = {"head"} if model.config.tie_word_embeddings else set()
        chosen = [name for name in projections if name not in plain and stored.quantizes(source_of[name])]
    else:
        chosen = [name for name in projections if name != "head" or quantize_head]

    def place(name: str) -> None:
        projection, source = projections[name], source_of[name]
        rows, columns = projection.weight.shape
        if stored is not None:
            shape = (rows, columns) if cut is None else cut.whole(name, (rows, columns))
            weight = stored.read(source, shape).to(device)
        else:
            weight = quantize(checkpoint.tensor(f"{source}.weight").to(device), quantization or "")
        if cut is not None:
            weight = cut.part(name, weight).to(device)
        model.set_submodule(name, QuantizedProjection(projection, weight))

    used = {f"{source_of[name]}.{part}" for name in chosen for part in PARTS} & checkpoint.names
    if stored is not None:
        num_bytes = sum(checkpoint.tensor(name).nbytes for name in used)  # mapped, not read
    else:
        num_bytes = sum(projections[name].weight.numel() for name in chosen) * (4 if quantization == "int4" else 8) // 8
    check_room(num_bytes, device, "The quantized part of the model")
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(place, chosen))
    return used
