"""Linear projections and their common interface. Introduced in phase 1a.

Every matrix of a model is called as ``proj(x, norm=, residual=, activation=)``. The plain implementation runs the
operations one after the other; quantized, gated-LoRA, tensor-parallel or fused ones replace it later without changes in
the blocks. Matrices that read the same input form a :class:`ProjectionGroup`, which one wide matrix may replace.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from shared.models.norm import RMSNorm, empty_parameter


class Projection(nn.Module):
    """``activation(norm(x) Wᵀ + b) + residual`` with W ``[out, in]``; every part but W may be absent."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x ``[T, in]`` to ``[T, out]``; ``residual`` has the shape of the result."""
        if norm is not None:
            x = norm(x)
        y = F.linear(x, self.weight, self.bias)
        if activation is not None:
            y = activation(y)
        return y if residual is None else residual + y


class ProjectionGroup(nn.Module):
    """Projections of the same input (queries, keys and values; gate and up), applied one after the other."""

    def __init__(self, **projections: Projection) -> None:
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> tuple[torch.Tensor, ...]:
        """x ``[T, in]`` to one ``[T, out]`` for each projection, in order."""
        if norm is not None:
            x = norm(x)
        return tuple(projection(x) for projection in self.children())
