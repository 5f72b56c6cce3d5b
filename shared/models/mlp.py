"""The gated MLP of a block. Introduced in phase 1a."""

import torch
from torch import nn

from shared.models.config import ModelConfig
from shared.models.projection import Projection
from shared.ops.gated import GATED_ACTIVATIONS


class GatedMLP(nn.Module):
    """``down(act(gate(x)) · up(x))``, the activation by the model's configuration."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, I, bias = config.hidden_size, config.intermediate_size, config.mlp_bias  # noqa: E741
        self.gate_proj = Projection(H, I, bias)
        self.up_proj = Projection(H, I, bias)
        self.down_proj = Projection(I, H, bias)
        self.gated = GATED_ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x ``[T, H]``, already normed, to ``[T, H]``."""
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)), residual=residual)
