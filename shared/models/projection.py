"""Linear projections and their common interface. Introduced in phase 1a.

Every matrix of a model is called as ``proj(x, norm=, residual=, gate=)``. The plain implementation runs the operations
one after the other; quantized, low-rank, tensor-parallel and fused implementations replace it later, without changes to
the families' blocks. Matrices that read the same input form a :class:`ProjectionGroup`, which one wide matrix may
replace.
"""

import torch
import torch.nn.functional as F
from torch import nn

from shared.models.norm import RMSNorm, empty_parameter
from shared.ops.gated import GatedOp


class Projection(nn.Module):
    """``norm(x) Wᵀ + b + residual`` with W ``[out, in]``; every part but W may be absent."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x ``[T, in]`` to ``[T, out]``.

        Args:
            residual: has the shape of the result; it may be overwritten.
            gate: ``Tokens.gate``, for low-rank additions (phase 11.1); other projections do not read it.
        """
        if norm is not None:
            x = norm(x)
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y


class ProjectionGroup(nn.Module):
    """Projections of the same input (queries, keys and values; gate and up), applied one after the other."""

    def __init__(self, **projections: Projection) -> None:
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)

    def forward(
        self, x: torch.Tensor, norm: RMSNorm | None = None, gate: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """x ``[T, in]`` to one ``[T, out]`` for each projection, in order; otherwise as for :class:`Projection`."""
        if norm is not None:
            x = norm(x)
        return tuple(projection(x, gate=gate) for projection in self.children())

    def heads(
        self, x: torch.Tensor, size: int, norm: RMSNorm | None = None, gate: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs in heads of ``size``: x ``[T, in]`` to one ``[T, out / size, size]`` for each projection."""
        return tuple(y.view(len(x), -1, size) for y in self(x, norm, gate))

    def activated(
        self, x: torch.Tensor, activation: GatedOp, norm: RMSNorm | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``activation`` of the outputs of two projections: x ``[T, in]`` to ``[T, out]``."""
        return activation(*self(x, norm, gate))
