"""The shape of a decoder model, independent of any file format. Introduced in phase 1a.

A ``ModelConfig`` holds only what the mathematics needs; ``shared.loading.config_json`` makes one from a checkpoint's
``config.json``. Invariant: every field is explicit, so no layer guesses a default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base ``theta``, frequencies scaled by ``kind``; see :mod:`shared.ops.rope`."""

    theta: float
    kind: str = "default"  # or linear, llama3, yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next: llama3
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # llama3 and yarn
    attention_factor: float = 1.0  # rotated queries and keys are multiplied by it: yarn
    beta_fast: float = 32.0  # this and the next: turns within the original positions, yarn
    beta_slow: float = 1.0
    truncate: bool = True  # whether yarn's blend begins and ends with a whole pair


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model: Hq query heads share Hkv key/value heads of size D."""

    family: str  # a key of shared.models.families.FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    attention_scale: float  # scores are q·k times this
    rope: RopeConfig
    windows: tuple[int | None, ...]  # sliding window of each layer, the token itself included; None: full attention
    local_rope: RopeConfig | None = None  # RoPE of sliding-window layers, if different from `rope` (Gemma 3)
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None  # scores become c·tanh(scores / c)
    logit_softcap: float | None = None
    dtype: str = "float32"  # the dtype declared by the checkpoint: float32, bfloat16 or float16
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)  # fields that only this family's block reads
    first_kv_head: int = 0  # the whole model's, if this is the shape of a rank's shard (phase 12.1)

    def layer_rope(self, layer: int) -> RopeConfig:
        """The RoPE of one layer: sliding-window layers may have a different base."""
        if self.local_rope is not None and self.windows[layer] is not None:
            return self.local_rope
        return self.rope
