"""Loads a whole model: from a folder or hub name to a :class:`CausalLM` with weights. Introduced in phase 1b.

Invariant: peak anonymous memory stays near the size of the weights in the target dtype (see ``weights.fill``).
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from shared.errors import ConfigError
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.cpu_threads import share_cpu
from shared.loading.placement import check_device, check_memory, default_dtype
from shared.loading.resolve import resolve_model
from shared.loading.sources import Source
from shared.loading.weights import fill, layer_sources
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.families import FAMILIES
from shared.models.projection import Projection

logger = logging.getLogger("infer.engine")

# Replaces projections of an empty model by loaded ones; returns the names of the tensors that were read.
Quantize = Callable[[CausalLM, dict[str, Source], Checkpoint, torch.device], set[str]]

# Makes an empty model from the checkpoint's config, the number of positions, and the device.
MakeModel = Callable[[ModelConfig, int, torch.device], CausalLM]


# Our parameters outside the blocks -> the checkpoint's tensors.
MODEL_TENSORS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
EMBEDDING, HEAD = MODEL_TENSORS["embedding.weight"], MODEL_TENSORS["head.weight"]

KV_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".q_scale", ".prob_scale")
"""Suffixes of the names of tensors that only an 8-bit KV cache and its attention need (phase 10)."""


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    quantize: Quantize | None = None,
    make_model: MakeModel = CausalLM,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint,
) -> CausalLM:
    """Load a model for inference.

    Args:
        name_or_path: a folder with config.json and safetensors, a known name (``smollm2-135m``), or a hub name.
        dtype: the dtype of the weights in memory; by default fp32 on a CPU and the checkpoint's on a GPU.
        device: the device of the weights.
        max_positions: number of RoPE positions; by default the model's maximum.
        quantize: loads quantized tensors, from phase 10 on; without it, quantized checkpoints are refused.
        make_model, open_checkpoint: make the empty model and open its tensors: all of them, or a shard (phase 12.1).

    Raises:
        ModelFolderError: the folder is missing, unsafe or damaged, or its model is not supported.
        ConfigError: ``max_positions`` is out of range, or the device is missing.
    """
    folder = resolve_model(name_or_path)
    config = read_config(folder, can_quantize=quantize is not None)
    checkpoint = open_checkpoint(folder)
    ties_head = is_tied(config, checkpoint)
    if config.tie_word_embeddings and not ties_head:
        logger.warning(
            "%s: config.json has tie_word_embeddings, and the checkpoint a head that is not its embedding; it is used",
            folder,
        )
    config = replace(config, tie_word_embeddings=ties_head)
    device = check_device(device)
    dtype = dtype or default_dtype(config, device)
    limit = config.max_position_embeddings
    if max_positions is not None and not 1 <= max_positions <= limit:
        raise ConfigError(f"max_positions is {max_positions}; this model takes from 1 to {limit} positions.")

    model = make_model(config, max_positions or limit, device)
    if device.type == "cpu":
        share_cpu(model)
    source_of = model_sources(model)
    # Old checkpoints contain the frequencies of RoPE, which are computed here.
    unused = {name for name in checkpoint.names if not name.endswith((".rotary_emb.inv_freq", *KV_SCALES))}
    unused -= {name for source in source_of.values() for name in source.names}
    if config.tie_word_embeddings:
        source = HEAD if {EMBEDDING, HEAD} & checkpoint.names == {HEAD} else EMBEDDING
        source_of |= dict.fromkeys(("embedding.weight", "head.weight"), Source.whole(source))
    if quantize is not None:
        unused -= quantize(model, source_of, checkpoint, device)
        source_of = {name: source_of[name] for name, _ in model.named_parameters()}
    shares_embedding = config.tie_word_embeddings and isinstance(model.head, Projection)
    if shares_embedding:
        del source_of["head.weight"]
        model.head.weight = model.embedding.weight
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    check_memory(num_bytes, device, f"The model in {str(dtype).removeprefix('torch.')}")
    fill(model, source_of, checkpoint, dtype, device, unused)
    if shares_embedding:
        model.head.weight = model.embedding.weight
    return model.eval()


def is_tied(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: config.json says so, and the checkpoint has no head of its own.

    A head that equals the embedding is a copy of it; a quantized one never is. If only the head is stored, the
    embedding is the head.
    """
    heads = {name for name in checkpoint.names if name.startswith("lm_head.")}
    if not config.tie_word_embeddings or heads - {HEAD}:
        return False
    if not {EMBEDDING, HEAD} <= checkpoint.names:
        return True
    embedding, head = checkpoint.tensor(EMBEDDING), checkpoint.tensor(HEAD)
    return embedding.dtype == head.dtype and torch.equal(embedding, head)


def model_sources(model: CausalLM) -> dict[str, Source]:
    """For each parameter of the model, the checkpoint's tensors that form it: one, except in a few families."""
    found = {name: Source.whole(tensor) for name, tensor in MODEL_TENSORS.items()}
    for layer, block in enumerate(model.blocks):
        of_block = layer_sources(FAMILIES[model.config.family], block, layer)
        found |= {f"blocks.{layer}.{name}": source for name, source in of_block.items()}
    return found
