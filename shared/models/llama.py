"""The Llama 3 block: pre-norm attention, pre-norm SwiGLU MLP. Introduced in phase 1a.

Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783. SmolLM2 belongs to this family.
"""

import torch
from torch import nn

from shared.models.attention import Attention, NormAndRotate
from shared.models.config import ModelConfig
from shared.models.mlp import GatedMLP
from shared.models.norm import RMSNorm
from shared.models.tokens import KVView, Tokens

# our module -> the checkpoint's, within one layer
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qkv.q_proj": "self_attn.q_proj",
    "attention.qkv.k_proj": "self_attn.k_proj",
    "attention.qkv.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up.gate_proj": "mlp.gate_proj",
    "mlp.gate_up.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
CONFIG_DEFAULTS = {"hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False}


class LlamaBlock(nn.Module):
    """One layer: x ``[T, H]`` to x ``[T, H]``, or to ``[n, H]`` if only the tokens in rows ``[n]`` are needed."""

    def __init__(self, config: ModelConfig, layer: int, table: torch.Tensor) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, NormAndRotate(table))
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, tokens: Tokens, kv: KVView, rows: torch.Tensor | None = None) -> torch.Tensor:
        x = self.attention(x, tokens, kv, rows, norm=self.attention_norm, residual=x if rows is None else x[rows])
        return self.mlp(x, tokens.with_gates_of(rows), norm=self.mlp_norm, residual=x)
