"""The model families: block, tensor names in the checkpoint, special features. Introduced in phase 1a.

A new family is a file with a block and its ``LAYER_NAMES``, and one row here.
"""

from dataclasses import dataclass

from torch import nn

from shared.models import gemma3, llama, qwen3


@dataclass(frozen=True)
class Family:
    """``scales_embeddings``: by √H after the lookup; ``norm_offset``: see :func:`shared.ops.rmsnorm.rms_norm`."""

    block: type[nn.Module]
    layer_names: dict[str, str]
    scales_embeddings: bool = False
    norm_offset: float = 0.0


FAMILIES = {
    "llama": Family(llama.LlamaBlock, llama.LAYER_NAMES),
    "qwen3": Family(qwen3.Qwen3Block, qwen3.LAYER_NAMES),
    "gemma3_text": Family(gemma3.Gemma3Block, gemma3.LAYER_NAMES, scales_embeddings=True, norm_offset=1.0),
}
