"""The Qwen 3 block: a Llama block that norms queries and keys per head before RoPE. Introduced in phase 1a.

Yang et al., "Qwen3 Technical Report", arXiv 2505.09388.
"""

import torch
from torch import nn

from shared.models import llama
from shared.models.attention import Attention, NormAndRotate
from shared.models.config import ModelConfig
from shared.models.mlp import GatedMLP
from shared.models.norm import RMSNorm
from shared.models.tokens import KVView, Tokens

LAYER_NAMES = llama.LAYER_NAMES | {"attention.qk.q_norm": "self_attn.q_norm", "attention.qk.k_norm": "self_attn.k_norm"}
CONFIG_DEFAULTS = llama.CONFIG_DEFAULTS | {"head_dim": 128}


class Qwen3Block(nn.Module):
    """One layer: x ``[T, H]`` to x ``[T, H]``, or to ``[n, H]`` if only the tokens in rows ``[n]`` are needed."""

    def __init__(self, config: ModelConfig, layer: int, table: torch.Tensor) -> None:
        super().__init__()
        D, eps = config.head_dim, config.rms_norm_eps
        self.attention_norm = RMSNorm(config.hidden_size, eps)
        self.attention = Attention(config, layer, NormAndRotate(table, RMSNorm(D, eps), RMSNorm(D, eps)))
        self.mlp_norm = RMSNorm(config.hidden_size, eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView, rows: torch.Tensor | None = None) -> torch.Tensor:
        x = self.attention(x, tokens, kv, rows, norm=self.attention_norm, residual=x if rows is None else x[rows])
        return self.mlp(x, tokens.with_gates_of(rows), norm=self.mlp_norm, residual=x)
