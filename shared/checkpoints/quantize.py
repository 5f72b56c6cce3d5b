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
from shared.loading.loader import is_tied, load_model, model_sources
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.projection import Projection
from shared.quantization.gptq import quantize_blocks
from shared.quantization.rounding import GROUPS, METHODS, quantize
from shared.quantization.weight import QuantizedWeight, unpack_nibbles
from shared.text.tokenizer import Tokenizer

WRITTEN = (*METHODS, "gptq")
TEXT_TOKENS = 16384  # further steps change little and take proportionally longer
COPIED = ("generation_config.json", "*token*.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template*")


def quantize_checkpoint(
    model: str | Path,
    folder: Path,
    method: str,
    quantize_head: bool = False,
    progress: Progress | None = None,
    text: Path | None = None,
) -> Path:
    """Round the matrices of a plain checkpoint by ``method`` and write them with its other files to ``folder``.

    INT4 needs one group size for all matrices. A head tied to the embedding cannot be quantized in a checkpoint.
    ``gptq`` gives INT4 whose errors are corrected on the first ``TEXT_TOKENS`` tokens of ``text``; a head is rounded.
    """
    if method not in WRITTEN:
        raise ConfigError(f"method is {method!r}; it must be one of {', '.join(WRITTEN)}.")
    if (method == "gptq") != (text is not None):
        raise ConfigError(
            f"method is {method!r} and text is {text and str(text)!r}; 'gptq' reads a text such as the model will be "
            "given, and the other methods none: name a text file with --text, or leave it out."
        )
    source = resolve_model(model)
    config = read_config(source)
    checkpoint = Checkpoint(source)
    ties_head = is_tied(config, checkpoint)
    if quantize_head and ties_head:
        raise ConfigError(
            f"The head of {source} is its embedding, which stays as it is; leave --quantize-head out, or quantize "
            "the head while the model loads."
        )
    if folder.exists() and any(folder.iterdir()):
        raise InferError(f"{folder} is not empty; name a new or an empty folder.")
    empty = CausalLM(config, 1)
    of_parameter = {name: made_of.tensor or "" for name, made_of in model_sources(empty).items()}
    if "" in of_parameter.values():
        raise InferError(
            f"{source} has several matrices in one tensor, or one in several; such a model is quantized while it loads "
            "only: choose `quantization` there."
        )
    matrices = {
        of_parameter[f"{name}.weight"]: module.weight.shape[1]
        for name, module in empty.named_modules()
        if isinstance(module, Projection) and (name != "head" or quantize_head)
    }
    # One scheme for all matrices: a group must divide the rows of each.
    group = next((size for size in GROUPS if not any(columns % size for columns in matrices.values())), None)
    stored = "int4" if method == "gptq" else method
    rounded: dict[str, QuantizedWeight] = {}
    if text is not None:
        if group is None:
            raise ConfigError(
                f"method 'gptq' needs rows that 32 divides; {source} has rows of {set(matrices.values())}."
            )
        ids = Tokenizer.load(source).encode(text.read_text(encoding="utf-8"))[:TEXT_TOKENS]
        for done, (name, weight) in enumerate(quantize_blocks(load_model(source), ids, group), start=1):
            rounded[of_parameter[f"{name}.weight"]] = weight
            if progress:
                progress("correct", done, len(matrices))
    tensors: dict[str, torch.Tensor] = {}
    names = sorted(checkpoint.names)
    for done, name in enumerate(names, start=1):
        tensor = checkpoint.tensor(name)
        if name in matrices:
            weight = rounded.pop(name) if name in rounded else quantize(tensor, stored, group)
            tensors |= _stored(name.removesuffix(".weight"), weight)
        else:
            tensors[name] = tensor
        if progress:
            progress("quantize", done, len(names))
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values["tie_word_embeddings"] = ties_head  # checked even if the source's config contradicts its tensors
    values["quantization_config"] = _config(stored, group, [] if quantize_head else ["lm_head"])
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
