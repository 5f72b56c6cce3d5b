"""The gated activations SwiGLU and GeGLU in one launch. Introduced in phase 3.1.

PyTorch needs two launches and a round trip through memory between them. For a few rows
(:mod:`shared.kernels.products.gemv`), and on Hopper for many (:mod:`shared.kernels.products.gated_gemm`), even this
launch is unnecessary: :func:`gated_activation` is the epilogue of the product that computes gate and up. Invariant:
gate and up are widened to fp32 and the product is rounded once.
"""

import torch

from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous
from shared.ops import gated as op

MOST_PROGRAMS = 1024  # starting a program takes the GPU about a nanosecond, so larger results use larger blocks
MAX_BLOCK = 2048


@triton.jit
def gated_activation(gate, up, ACTIVATION: tl.constexpr):
    """``silu(gate) · up`` or ``gelu(gate) · up`` in fp32.

    GELU's tanh form is g · ½ (1 + tanh u) with u = √(2/π) (g + 0.044715 g³). Triton has a sigmoid but no tanh.
    """
    # exercise 03.1x1: both gated activations, GELU without a tanh
    # hint: ACTIVATION is a compile-time string: use a plain if; only one branch is compiled
    # hint: silu(x) is x * tl.sigmoid(x)
    # hint: ½ (1 + tanh u) is the sigmoid of 2u
    # hint: 2 sqrt(2/pi) is 1.5957691216057308; factor out gate, so that no power is needed
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    # end exercise


@triton.jit
def gated_kernel(
    gate, up, out, n, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_stride + i, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + i, gated_activation(g, u, ACTIVATION), mask=i < n)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """:func:`shared.ops.gated.swiglu` of ``[T, I]`` and ``[T, I]``, which may be the halves of one ``[T, 2I]``."""
    return _launch(gate, up, "silu") if launches(gate) else op.swiglu(gate, up)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """:func:`shared.ops.gated.geglu` of ``[T, I]`` and ``[T, I]``, which may be the halves of one ``[T, 2I]``."""
    return _launch(gate, up, "gelu_tanh") if launches(gate) else op.geglu(gate, up)


def _launch(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    T, I = gate.shape  # noqa: E741
    out = gate.new_empty(T, I)
    if out.numel() == 0:
        return out
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    up = up if up.stride(1) == 1 else up.contiguous()
    block = min(MAX_BLOCK, max(256, next_power_of_two(T * I // MOST_PROGRAMS)))
    grid = (T, -(-I // block))
    strides = (gate.stride(0), up.stride(0))
    num_warps = max(4, block // 256)
    launch(gated_kernel, grid, gate, up, out, I, *strides, ACTIVATION=activation, BLOCK=block, num_warps=num_warps)
    return out
