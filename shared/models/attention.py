"""The attention layer: project, write keys and values to the KV view, attend, project back. Introduced in phase 1a.

Invariant: this module owns the mathematics (projections, QK-norm, RoPE table, scale, window), and the view owns the
storage of keys and values. They meet in ``kv.write``, which receives both.
"""

import torch
from torch import nn

from shared.models.config import ModelConfig
from shared.models.norm import RMSNorm
from shared.models.projection import Projection, ProjectionGroup
from shared.models.tokens import KVView, Tokens
from shared.ops.rope import rotate


class NormAndRotate(nn.Module):
    """The transform of a layer's queries and keys: QK-norm if the family has it, then RoPE.

    The order matters: a norm with per-channel weights does not commute with the rotation.
    """

    def __init__(self, table: torch.Tensor, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None) -> None:
        super().__init__()
        self.table = table  # [positions, 2, 1, D], shared by all layers with the same RoPE; not part of the state
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q ``[T, Hq, D]``, k ``[T, Hkv, D]``, positions int64 ``[T]``."""
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        both = rotate(torch.cat((q, k), dim=1), self.table.index_select(0, positions))
        q, k = both.split((q.shape[1], k.shape[1]), dim=1)
        return q, k


class Attention(nn.Module):
    """Grouped-query attention of layer ``layer``; ``qk`` is the family's own :class:`NormAndRotate`."""

    def __init__(self, config: ModelConfig, layer: int, qk: NormAndRotate) -> None:
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.layer = layer
        self.head_dim = D
        self.scale = config.attention_scale
        self.window = config.windows[layer]
        self.softcap = config.attention_softcap
        self.qkv = ProjectionGroup(
            q_proj=Projection(H, config.num_heads * D, bias),
            k_proj=Projection(H, config.num_kv_heads * D, bias),
            v_proj=Projection(H, config.num_kv_heads * D, bias),
        )
        self.o_proj = Projection(config.num_heads * D, H, bias)
        self.qk = qk

    def forward(
        self,
        x: torch.Tensor,
        tokens: Tokens,
        kv: KVView,
        rows: torch.Tensor | None = None,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``residual + attention(norm(x))``: ``[T, H]`` to ``[T, H]``; both may be absent, the residual overwritten.

        Args:
            rows: int64 ``[n]``, the tokens whose outputs are needed; the result and ``residual`` are then ``[n, H]``.
        """
        q, k, v = self.qkv.heads(x, self.head_dim, norm, tokens.gate)  # [T, Hq, D], [T, Hkv, D] twice
        q = kv.write(self.layer, q, k, v, tokens.positions, self.qk)
        out = kv.attend(self.layer, q, scale=self.scale, window=self.window, softcap=self.softcap)
        out = out.flatten(1) if rows is None else out.flatten(1)[rows]
        return self.o_proj(out, residual=residual, gate=tokens.with_gates_of(rows).gate)

    __call__ = forward  # skips nn.Module's hooks, which cost as much as an operation
