"""RMSNorm fused with the operations around it, in one launch. Introduced in phase 3.1.

A norm reads a vector, reduces it to one number, and writes a vector of the same size: by itself it costs a launch and a
round trip through memory. The operation before it (the residual addition, a Gemma block's norm after attention) or
after it (another addition) works on the same vector. So one program applies the chain

    x → [post-norm] → [+ residual → summed] → [norm → normed]

to a row; each launcher uses a part of it. Invariants: all arithmetic is fp32; ``summed`` is rounded to the dtype of x
before the norm, as if it had been written and read back; each result is rounded once.
"""

from typing import Protocol

import torch

from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous
from shared.ops import rmsnorm as op


class Norm(Protocol):
    """The interface of a norm; ``shared.models.norm.RMSNorm`` is one."""

    @property
    def weight(self) -> torch.Tensor: ...  # [n]
    @property
    def eps(self) -> float: ...
    @property
    def offset(self) -> float: ...


@triton.jit
def load_scale(weight, i, n, OFFSET: tl.constexpr):
    """``weight + OFFSET`` at i, in fp32."""
    return tl.load(weight + i, mask=i < n, other=0.0).to(tl.float32) + OFFSET


@triton.jit
def normalize(h, scale, n, eps):
    """``h / sqrt(mean(h²) + eps) · scale`` in fp32; h has n elements, followed by zeros."""
    return h * tl.rsqrt(tl.sum(h * h) / n + eps) * scale


@triton.jit
def rms_norm_kernel(
    x, post_weight, residual, weight, summed, normed, n, x_stride, residual_stride, post_eps, eps,
    POST_OFFSET: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < n
    if post_weight is not None:
        post_scale = load_scale(post_weight, i, n, POST_OFFSET)
    if weight is not None:
        scale = load_scale(weight, i, n, OFFSET)
    wait_for_previous(PDL)
    # exercise 03.1x2: norm, addition and norm of a row, in registers
    # hint: load in fp32 with other=0.0, so that elements past the row's end add nothing to a sum
    # hint: post_weight, residual and weight are None if the launcher does not use that part
    # hint: the norms' weights are loaded already: normalize takes post_scale and scale
    # hint: the sum is stored in the dtype of summed; norm the rounded sum
    h = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if post_weight is not None:
        h = normalize(h, post_scale, n, post_eps)
    if residual is not None:
        h += tl.load(residual + row * residual_stride + i, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(summed.dtype.element_ty)
        tl.store(summed + row * n + i, rounded, mask=inside)
        h = rounded.to(tl.float32)
    if weight is not None:
        tl.store(normed + row * n + i, normalize(h, scale, n, eps), mask=inside)
    # end exercise


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`shared.ops.rmsnorm.rms_norm`, then ``+ residual`` if there is one.

    Args:
        x: ``[..., n]``; rows may be strided.
        weight: ``[n]``.
        residual: of the shape and dtype of x.
    """
    if not launches(x):
        normed = op.rms_norm(x, weight, eps, offset)
        return normed if residual is None else residual + normed
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if residual is None:
        _launch(x, None, None, weight, eps, offset, summed=None, normed=out)
    else:
        _launch(x, (weight, eps, offset), residual, None, 0.0, 0.0, summed=out, normed=None)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    post_norm: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed = x + residual`` and its RMSNorm; returns (normed, summed), both of the shape and dtype of x.

    Args:
        x, residual: ``[..., n]``; rows may be strided.
        weight, eps, offset: the norm's, as in :func:`shared.ops.rmsnorm.rms_norm`.
        post_norm: if given, x goes through this norm before it is added (Gemma).
    """
    if not launches(x):
        if post_norm is not None:
            x = op.rms_norm(x, post_norm.weight, post_norm.eps, post_norm.offset)
        summed = x + residual
        return op.rms_norm(summed, weight, eps, offset), summed
    summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = torch.empty_like(summed)
    post = None if post_norm is None else (post_norm.weight, post_norm.eps, post_norm.offset)
    _launch(x, post, residual, weight, eps, offset, summed, normed)
    return normed, summed


def _launch(
    x: torch.Tensor,
    post: tuple[torch.Tensor, float, float] | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    summed: torch.Tensor | None,
    normed: torch.Tensor | None,
) -> None:
    """One program per row; the outputs are contiguous."""
    n = x.shape[-1]
    if x.numel() == 0:
        return
    x = _rows(x)
    residual = None if residual is None else _rows(residual)
    post_weight, post_eps, post_offset = post or (None, 0.0, 0.0)
    block = next_power_of_two(n)
    launch(
        rms_norm_kernel, (x.shape[0],),
        x, post_weight, residual, weight, summed, normed, n, x.stride(0), 0 if residual is None else residual.stride(0),
        post_eps, eps,
        POST_OFFSET=post_offset, OFFSET=offset, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as ``[rows, n]`` with contiguous rows; copied only if strides cannot express that."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
