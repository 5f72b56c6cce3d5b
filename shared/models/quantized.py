"""A projection with an 8- or 4-bit weight, with the common interface, and an MLP of them. Introduced in phase 10."""

from collections.abc import Sequence

import torch
from torch import nn

from shared.kernels.products import quantized_gemv
from shared.models.fused import fused, merged
from shared.models.mlp import GatedMLP
from shared.models.norm import RMSNorm
from shared.models.parts import MergedGroup, merged_biases
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.ops.gated import GatedOp
from shared.quantization.weight import QuantizedWeight, concatenate, mergeable


class QuantizedProjection(nn.Module):
    """Replaces a :class:`Projection`, and keeps its bias."""

    def __init__(self, projection: Projection, weight: QuantizedWeight) -> None:
        super().__init__()
        self.weight = weight
        self.bias = projection.bias

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x ``[T, in]`` to ``[T, out]``; ``residual`` has the shape of the result."""
        if norm is not None:
            x = norm(x)
        y = quantized_gemv.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y

    @staticmethod
    def fused(projections: Sequence[nn.Module]) -> nn.Module:
        """The fused version of projections with the same x, at least one of which is quantized."""
        return FusedQuantizedProjection(projections)


class QuantizedMLP(GatedMLP):
    """A :class:`GatedMLP` that rounds the activated rows of a prompt to FP8 as it activates them.

    Only its own quantized and fused down projection is passed gate and up; ranks and adapters replace it.
    """

    def __init__(self, mlp: GatedMLP) -> None:
        nn.Module.__init__(self)
        self.gate_up, self.down_proj, self.gated = mlp.gate_up, mlp.down_proj, mlp.gated

    def forward(
        self, x: torch.Tensor, tokens: Tokens, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As of :class:`GatedMLP`."""
        down, group = self.down_proj, self.gate_up
        if not (isinstance(down, FusedQuantizedProjection) and isinstance(group, MergedGroup) and down.rounds(x)):
            return super().forward(x, tokens, norm, residual)
        both = group.matrix(x, norm, None, tokens.gate)
        return quantized_gemv.gated_linear(both, down.weight, down.bias, residual, self.gated)

    __call__ = forward


class FusedQuantizedProjection(nn.Module):
    """Like :class:`FusedProjection`; matrices of different formats stay separate."""

    def __init__(self, projections: Sequence[nn.Module]) -> None:
        super().__init__()
        members = [member for member in projections if isinstance(member, QuantizedProjection)]
        weights = [member.weight for member in members]
        biases = merged_biases(members)
        self.parts: list[nn.Module] = []
        if len(members) == len(projections) and mergeable(weights):
            self.weight = concatenate(weights)
            self.bias = merged(biases) if biases else None
        else:
            self.parts = [fused([projection]) for projection in projections]

    def rounds(self, x: torch.Tensor) -> bool:
        """Whether the rows of a product with x are rounded to FP8 before it."""
        return not self.parts and quantized_gemv.rounds_prompts(x, self.weight)

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        activation: GatedOp | None = None,
    ) -> torch.Tensor:
        """x ``[T, in]`` to ``[T, out]``; with an activation of concatenated gate and up, to ``[T, out / 2]``."""
        if not self.parts:
            return quantized_gemv.linear(x, self.weight, self.bias, norm, residual, activation)
        y = torch.cat([part(x, norm) for part in self.parts], dim=1)
        if activation is not None:
            y = activation(*y.chunk(2, dim=1))
        return y if residual is None else residual + y

    __call__ = forward  # skips nn.Module's hooks, as FusedProjection does
