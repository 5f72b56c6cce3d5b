"""The scales that a checkpoint carries for an 8-bit KV cache. Introduced in phase 10.

Tools that quantize weights can also write, for each layer, the divisor of keys and values: one number, or one per KV
head. compressed-tensors names them ``self_attn.k_scale``, and earlier ``self_attn.k_proj.output_scale``; NVIDIA's
ModelOpt ``self_attn.k_proj.k_scale``. Engines with a 16-bit KV cache do not need them, so the loader skips them.
"""

import re

import torch

from shared.errors import ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.models.config import ModelConfig

NAMES = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_scale|([kv])_proj\.(?:\3_scale|output_scale))")


def kv_scales(checkpoint: Checkpoint, config: ModelConfig) -> torch.Tensor | None:
    """The scales of keys and of values, fp32 ``[2, layers, Hkv]``; None if the checkpoint has none.

    Raises ModelFolderError if some are missing, or one has another shape or is not a positive number.
    """
    scales = torch.full((2, config.num_layers, config.num_kv_heads), torch.nan)
    for name in sorted(checkpoint.names):
        match = NAMES.fullmatch(name)
        if match is None or int(match[1]) >= config.num_layers:
            continue
        scale = checkpoint.tensor(name).float().flatten()
        if len(scale) not in (1, config.num_kv_heads):
            raise ModelFolderError(
                f"{name} in {checkpoint.folder} has {len(scale)} numbers; a layer's scale of the KV cache is one "
                f"number, or one for each of {config.num_kv_heads} KV heads."
            )
        if not ((scale > 0) & scale.isfinite()).all():
            raise ModelFolderError(
                f"{name} in {checkpoint.folder} is {scale.tolist()}; a scale of the KV cache must be positive and "
                "finite."
            )
        scales[int("v" in (match[2], match[3])), int(match[1])] = scale
    is_missing = scales.isnan().any(-1)
    if is_missing.all():
        return None
    if is_missing.any():
        kind, layer = is_missing.nonzero()[0].tolist()
        raise ModelFolderError(
            f"{checkpoint.folder} has scales of the KV cache, and none for the {('keys', 'values')[kind]} of layer "
            f"{layer}; a checkpoint has them for all layers, or for none."
        )
    return scales
