"""Sharded matrices and embeddings, with the interfaces of the whole ones.

Introduced in phase 12.1. A column-parallel matrix needs no class: a rank's rows give its columns of the output, and the
row-parallel matrix after it takes them as its input. Invariant: these modules return the same result on every rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.models.causal_lm import Embedding
from shared.models.fused import fused
from shared.models.norm import RMSNorm
from shared.models.parts import find_at_once
from shared.tracks.ranks.collectives import Collectives


class RowParallelProjection(nn.Module):
    """``Σ x_r W_rᵀ + b + residual`` over the ranks r; replaces a projection.

    Args:
        projection: this rank's columns of the matrix, plain, quantized or fused; its bias is moved here.
    """

    def __init__(self, projection: Any, ranks: Collectives) -> None:
        super().__init__()
        self.projection, self.ranks = projection, ranks
        self.bias = projection.bias
        projection.bias = None

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """This rank's x ``[T, in / N]`` to the complete ``[T, out]``."""
        assert norm is None, "a norm needs the whole row"
        if self.ranks.peers is not None and self.bias is None and activation is None:
            return self.ranks.all_sum(self.projection(x), residual)  # GPUs add the residual in the same launch
        # exercise 12.1x2: the row-parallel sum
        # hint: self.projection(x) is this rank's term; self.ranks.all_sum adds those of all ranks
        # hint: what every rank has (bias, residual) is added once: after the sum
        # hint: an activation is not linear, so it too comes after the sum, and before the residual
        y = self.ranks.all_sum(self.projection(x))
        if self.bias is not None:
            y = y + self.bias
        if activation is not None:
            y = activation(y)
        return y if residual is None else residual + y
        # end exercise

    __call__ = forward  # skips nn.Module's hooks, as FusedProjection does

    @staticmethod
    def fused(projections: Sequence[Any]) -> nn.Module:
        """The fused version of this projection."""
        (whole,) = projections
        whole.projection = fused([whole.projection])
        find_at_once(whole)
        return whole


class VocabularyEmbedding(nn.Module):
    """Token ids ``[T]`` to vectors ``[T, H]``, from this rank's rows of the table and the other ranks'."""

    def __init__(self, embedding: Embedding, part: range, ranks: Collectives) -> None:
        super().__init__()
        self.weight, self.scale = embedding.weight, embedding.scale
        self.part, self.ranks = part, ranks

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.part.start
        is_here = (own >= 0) & (own < len(self.part))
        x = F.embedding(own.clamp(0, len(self.part) - 1), self.weight) * is_here[:, None]
        x = self.ranks.all_sum(x)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype)
