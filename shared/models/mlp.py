"""The gated MLP of a block. Introduced in phase 1a."""

import torch
from torch import nn

from shared.models.config import ModelConfig
from shared.models.norm import RMSNorm
from shared.models.projection import Projection, ProjectionGroup
from shared.models.tokens import Tokens
from shared.ops.gated import GATED_ACTIVATIONS


class GatedMLP(nn.Module):
    """``down(act(gate(x)) · up(x))``; the configuration names the activation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, I, bias = config.hidden_size, config.intermediate_size, config.mlp_bias  # noqa: E741
        self.gate_up = ProjectionGroup(gate_proj=Projection(H, I, bias), up_proj=Projection(H, I, bias))
        self.down_proj = Projection(I, H, bias)
        self.gated = GATED_ACTIVATIONS[config.hidden_act]

    def forward(
        self, x: torch.Tensor, tokens: Tokens, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``residual + mlp(norm(x))``: ``[T, H]`` to ``[T, H]``; both may be absent, the residual overwritten."""
        h = self.gate_up.activated(x, self.gated, norm, tokens.gate)  # act(gate(x)) · up(x)
        return self.down_proj(h, residual=residual, gate=tokens.gate)

    __call__ = forward  # as Attention does
