"""Loads a rank's shard of a model. Introduced in phase 12.1.

Invariant: the model returns what the whole one returns, except that the logits are only the rank's columns.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shared.errors import ConfigError
from shared.loading.config_json import read_config
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.families import FAMILIES
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.model_shard import ModelShard, ShardCheckpoint, WatchedCheckpoint
from shared.tracks.ranks.projection import RowParallelProjection, VocabularyEmbedding
from shared.tracks.ranks.shard import Shard

ROW_PARALLEL = (".o_proj", ".down_proj")
BLOCK = 128
"""Columns of the MLP at whose multiples a quantized model is divided: the largest block that has a scale."""


def load_part(
    folder: Path,
    ranks: Collectives,
    *,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    quantize_head: bool = False,
    check: Callable[[], None] = lambda: None,
) -> CausalLM:
    """This rank's shard of a model; its config is the shard's, except for ``vocab_size``.

    Args:
        quantization, quantize_head: as for :func:`shared.loading.quantized.quantizer`.
        check: called before each tensor is read; raises if another rank is lost.

    Raises ConfigError if the number of ranks does not divide the model, and whatever ``load_model`` raises.
    """
    whole = read_config(folder, can_quantize=True)
    family = FAMILIES[whole.family]
    if family.own_fields or not all(isinstance(name, str) for name in family.layer_names.values()):
        raise ConfigError(
            f"tensor_parallel_size is {ranks.size}, and models of family {whole.family!r} have sizes or tensors of "
            "their own that are not sharded; leave it at 1."
        )
    is_quantized = quantization is not None or _is_quantized(folder)
    shard = ModelShard(Shard(ranks.rank, ranks.size), whole, BLOCK if is_quantized else 1)
    place = quantizer(quantization, quantize_head, shard)
    model = load_model(
        folder,
        dtype=dtype,
        device=ranks.device,
        quantize=lambda model, names, _, device: place(model, names, WatchedCheckpoint(folder, check), device),
        make_model=partial(_part_of, shard),
        open_checkpoint=partial(ShardCheckpoint, shard=shard, check=check),
    )
    model.embedding = VocabularyEmbedding(model.embedding, shard.shard.part(whole.vocab_size), ranks)  # type: ignore[assignment]
    for name, projection in list(model.blocks.named_modules()):
        if name.endswith(ROW_PARALLEL):
            model.blocks.set_submodule(name, RowParallelProjection(projection, ranks))
    return model


def _part_of(shard: ModelShard, config: ModelConfig, max_positions: int, device: torch.device) -> CausalLM:
    """An empty model of the shard's shape."""
    model = CausalLM(shard.shard.local(config, shard.multiple), max_positions, device)
    model.config = replace(model.config, vocab_size=config.vocab_size)
    return model


def _is_quantized(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config") is not None
