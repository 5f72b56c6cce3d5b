"""The Gemma 3 block: norms on both sides of attention and MLP, GeGLU, QK-norm. Introduced in phase 1a.

Gemma Team, "Gemma 3 Technical Report", arXiv 2503.19786. Norm weights are stored as their distance from one. Most
layers have a sliding window and a different RoPE base; both come from the configuration, per layer.
"""

import torch
from torch import nn

from shared.models import qwen3
from shared.models.attention import Attention, NormAndRotate
from shared.models.config import ModelConfig
from shared.models.mlp import GatedMLP
from shared.models.norm import RMSNorm
from shared.models.tokens import KVView, Tokens

LAYER_NAMES = qwen3.LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
CONFIG_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


class Gemma3Block(nn.Module):
    """One layer: x ``[T, H]`` to x ``[T, H]``, or to ``[n, H]`` if only the tokens in rows ``[n]`` are needed."""

    def __init__(self, config: ModelConfig, layer: int, table: torch.Tensor) -> None:
        super().__init__()
        H, D, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        qk = NormAndRotate(table, RMSNorm(D, eps, offset=1.0), RMSNorm(D, eps, offset=1.0))
        self.attention_norm = RMSNorm(H, eps, offset=1.0)
        self.attention = Attention(config, layer, qk)
        self.post_attention_norm = RMSNorm(H, eps, offset=1.0)
        self.mlp_norm = RMSNorm(H, eps, offset=1.0)
        self.mlp = GatedMLP(config)
        self.post_mlp_norm = RMSNorm(H, eps, offset=1.0)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView, rows: torch.Tensor | None = None) -> torch.Tensor:
        y = self.attention(x, tokens, kv, rows, norm=self.attention_norm)
        x = x if rows is None else x[rows]
        h, x = self.mlp_norm.after(self.post_attention_norm, y, residual=x)  # x + post_attention_norm(y), and its norm
        return self.post_mlp_norm(self.mlp(h, tokens.with_gates_of(rows)), residual=x)
