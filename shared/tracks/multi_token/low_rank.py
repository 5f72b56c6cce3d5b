"""A gated low-rank addition's second product, and the operations after it. Introduced in phase 11.1."""

import torch
from torch import Tensor

from shared.ops.gated import GatedOp


def add_low_rank(
    y: Tensor, b: Tensor, gate: Tensor, scale: float, residual: Tensor | None = None, activation: GatedOp | None = None
) -> Tensor:
    """``y + scale · gate · low Bᵀ``, where the last r columns of y are ``low = A x`` and the others ``W x``.

    Args:
        y: ``[T, N + r]``, the product with the rows of W followed by those of A.
        b: B, ``[N, r]``.
        gate: ``[T]``, in any float dtype.
        residual: ``[T, N]``, added last.
        activation: of the first and the second half of the N columns, before the residual.

    Returns:
        ``[T, N]``, with an activation ``[T, N / 2]``, in the dtype of y.
    """
    low = y[:, b.shape[0] :] * gate.to(y.dtype)[:, None]
    out = torch.addmm(y[:, : b.shape[0]], low, b.to(y.dtype).T, alpha=scale)
    if activation is not None:
        out = activation(*out.chunk(2, dim=1))
    return out if residual is None else residual + out
