"""Loads a rank's shard of a model. Introduced in phase 12.1.

Invariant: the model returns the same as the whole one, except for logits, of which it has the rank's columns.
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
from shared.tracks.ranks.cut import CutCheckpoint, ModelCut, WatchedCheckpoint
from shared.tracks.ranks.projection import RowParallelProjection, VocabularyEmbedding
from shared.tracks.ranks.shard import Shard

ROW_PARALLEL = (".o_proj", ".down_proj")
BLOCK = 128
"""Columns of the MLP at whose multiples a quantized model is cut: the largest block that has a scale."""


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

    Args: quantization, quantize_head: as for :func:`shared.loading.quantized.quantizer`. check: called before each
        tensor is read; raises if another rank is lost.

    Raises ConfigError for a number of ranks that does not divide the model, and what ``load_model`` raises.
    """
    whole = read_config(folder, can_quantize=True)
    family = FAMILIES[whole.family]
    if family.own_fields or not all(isinstance(name, str) for name in family.layer_names.values()):
        raise ConfigError(
            f"tensor_parallel_size is {ranks.size}, and models of family {whole.family!r} have sizes or tensors of "
            "their own that are not cut; leave it at 1."
        )
    is_quantized = quantization is not None or _is_quantized(folder)
    cut = ModelCut(Shard(ranks.rank, ranks.size), whole, BLOCK if is_quantized else 1)
    place = quantizer(quantization, quantize_head, cut)
    model = load_model(
        folder,
        dtype=dtype,
        device=ranks.device,
        quantize=lambda model, names, _, device: place(model, names, WatchedCheckpoint(folder, check), device),
        make_model=partial(_part_of, cut),
        open_checkpoint=partial(CutCheckpoint, cut=cut, check=check),
    )
    model.embedding = VocabularyEmbedding(model.embedding, cut.shard.part(whole.vocab_size), ranks)  # type: ignore[assignment]
    for name, projection in list(model.blocks.named_modules()):
        if name.endswith(ROW_PARALLEL):
            model.blocks.set_submodule(name, RowParallelProjection(projection, ranks))
    return model


def _part_of(cut: ModelCut, config: ModelConfig, max_positions: int, device: torch.device) -> CausalLM:
    """An empty model of the shard's shape."""
    model = CausalLM(cut.shard.local(config, cut.multiple), max_positions, device)
    model.config = replace(model.config, vocab_size=config.vocab_size)
    return model


def _is_quantized(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config") is not None
