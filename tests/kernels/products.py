"""A product with its prologue and epilogue in fp64, and how far off a kernel's may be."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from shared.kernels.launch import INTERPRETED
from shared.models.norm import RMSNorm
from shared.ops.gated import geglu, swiglu

EPS = 1e-5
FORMULAS: dict[Callable, Callable] = {
    swiglu: lambda gate, up: F.silu(gate) * up,
    geglu: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
}


def norm_of(weight: torch.Tensor, offset: float) -> RMSNorm:
    norm = RMSNorm(len(weight), EPS, offset)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def normed(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    """The norm in fp64."""
    if norm is None:
        return x.double()
    h = x.double()
    return h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * (norm.weight.double() + norm.offset)


def share_of_terms(dtype: torch.dtype, norm: RMSNorm | None) -> float:
    """How many steps of the dtype a sum may be off, for each of the size of its terms.

    It adds some steps of fp32; where x is normed, each term carries the rounding of the normed x, half a step.
    """
    share = 8 * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    if norm is not None:
        share += 1.0 if INTERPRETED and dtype == torch.bfloat16 else 0.5
    return share


def assert_product(
    assert_near: Callable,
    out: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    size: torch.Tensor,
    share: float,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Callable | None,
) -> None:
    """The result is rounded once: a step of its own size; its sum is off by a ``share`` of its terms.

    Args:
        h: the normed x in fp64; ``w``: W in fp64; ``size``: of W's terms, the magnitudes that are added up.
        residual: as it was before the product.
    """
    y, terms = h @ w.t(), h.abs() @ size.t()
    if bias is not None:
        y, terms = y + bias.double(), terms + bias.double().abs()
    if activation is not None:
        (gate, up), (gate_terms, up_terms) = y.chunk(2, -1), terms.chunk(2, -1)
        y, terms = FORMULAS[activation](gate, up), gate_terms * up.abs() + gate.abs() * up_terms
    if residual is not None:
        y, terms = y + residual.double(), terms + residual.double().abs()
    assert_near(out, y, ulps=1.0, scale=y.abs() + share * terms, axes=("row", "column"))
