"""Writes a quantized checkpoint in the format of compressed-tensors. Introduced in phase 10.

Invariant: memory holds the quantized matrices; the other tensors stay mapped from the source.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shared.checkpoints.progress import Progress
from shared.errors import ConfigError, InferError
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.loader import tensor_names
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.projection import Projection
from shared.quantization.rounding import GROUPS, METHODS, quantize
from shared.quantization.weight import QuantizedWeight, unpack_nibbles

COPIED = ("generation_config.json", "*token*.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template*")


def quantize_checkpoint(
    model: str | Path, folder: Path, method: str, quantize_head: bool = False, progress: Progress | None = None
) -> Path:
    """Round the matrices of a plain checkpoint by ``method`` and write them with its other files to ``folder``.

    INT4 needs one size of group for all matrices. A head tied to the embedding cannot be quantized in a checkpoint.
    """
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}; it must be one of {', '.join(METHODS)}.")
    source = resolve_model(model)
    config = read_config(source)
    checkpoint = Checkpoint(source)
    if config.tie_word_embeddings and quantize_head:
        raise ConfigError(
            f"The head of {source} is its embedding, which stays as it is; leave --quantize-head out, or quantize "
            "the head while the model loads."
        )
    if folder.exists() and any(folder.iterdir()):
        raise InferError(f"{folder} is not empty; name a new or an empty folder.")
    empty = CausalLM(config, 1)
    of_parameter = tensor_names(empty)
    matrices = {
        of_parameter[f"{name}.weight"]: module.weight.shape[1]
        for name, module in empty.named_modules()
        if isinstance(module, Projection) and (name != "head" or quantize_head)
    }
    # One scheme for all matrices: a group must divide the rows of each.
    group = next((size for size in GROUPS if not any(columns % size for columns in matrices.values())), None)
    tensors: dict[str, torch.Tensor] = {}
    names = sorted(checkpoint.names)
    for done, name in enumerate(names, start=1):
        tensor = checkpoint.tensor(name)
        if name in matrices:
            tensors |= _stored(name.removesuffix(".weight"), quantize(tensor, method, group))
        else:
            tensors[name] = tensor
        if progress:
            progress("quantize", done, len(names))
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] = _config(method, group, [] if quantize_head else ["lm_head"])
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return folder


def _stored(module: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a matrix, by name."""
    scales = {f"{module}.weight_scale": weight.scales}
    if weight.bits == 8:
        return scales | {f"{module}.weight": weight.values}
    numbers = unpack_nibbles(weight.values, weight.run).int().unflatten(1, (-1, 8))
    packed = (numbers << torch.arange(0, 32, 4, dtype=torch.int32)).sum(2, dtype=torch.int32)
    return scales | {
        f"{module}.weight_packed": packed,
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _config(method: str, group: int | None, ignore: list[str]) -> dict[str, Any]:
    stored = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}[method]
    weights: dict[str, Any] = {
        "num_bits": 4 if method == "int4" else 8,
        "type": "float" if method == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if method == "int4" else "channel",
        "group_size": group if method == "int4" else None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group_0: dict[str, Any] = {
        "targets": ["Linear"],
        "format": stored,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_0},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
