"""The model families: each one's block, tensor names in the checkpoint, and special features. Introduced in phase 1a.

A new family is a file with a block, its ``LAYER_NAMES`` and ``CONFIG_DEFAULTS``, and one row here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shared.models import gemma3, llama, qwen3
from shared.models.tensor_names import TensorNames


@dataclass(frozen=True)
class Family:
    """The specifics of a family.

    Args:
        block: its layer, made of a config, a layer's number and a RoPE table.
        layer_names: maps its modules to the checkpoint's, within a layer: :mod:`shared.models.tensor_names`.
        config_defaults: the values of fields that its ``config.json`` may omit, as in transformers.
        own_fields: further fields of ``config.json`` that the block needs: ``ModelConfig.own``, unchanged.
        scales_embeddings: whether embeddings are multiplied by √H after the lookup.
        norm_offset: see :func:`shared.ops.rmsnorm.rms_norm`.
    """

    block: type[nn.Module]
    layer_names: Mapping[str, TensorNames]
    config_defaults: Mapping[str, Any]
    own_fields: tuple[str, ...] = ()
    scales_embeddings: bool = False
    norm_offset: float = 0.0


FAMILIES = {
    "llama": Family(llama.LlamaBlock, llama.LAYER_NAMES, llama.CONFIG_DEFAULTS),
    "qwen3": Family(qwen3.Qwen3Block, qwen3.LAYER_NAMES, qwen3.CONFIG_DEFAULTS),
    "gemma3_text": Family(
        gemma3.Gemma3Block, gemma3.LAYER_NAMES, gemma3.CONFIG_DEFAULTS, scales_embeddings=True, norm_offset=1.0
    ),
}
