"""Products of several rows with a weight in FP8 that stays in FP8. Introduced in phase 10.

Widening FP8 takes two and a half instructions per number. On a GPU with fast memory, they take longer than the reads:
with 16 rows, Qwen3-8B's gate and up took 37 µs on an H200, which reads their bytes in 24. So x is rounded to FP8, with
one scale per row, and the tensor cores multiply both directly from shared memory. With up to eight rows, which is more
than one request verifies by default, x keeps its dtype (:mod:`shared.kernels.products.quantized_rows`). So a request
gets the same tokens with speculative decoding as without.

Hopper's tensor cores keep 14 bits of a sum of FP8 products (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). So each
tile's sum is added to the others outside of them, which takes no measurable time.

Invariants: W is read once; the sums of several programs are added in the order of the columns, and their counters are
zero between launches.
"""

import torch

from shared.kernels.arrival import memory_of_parts, sum_of_parts
from shared.kernels.launch import launch, launch_dependents, tl, triton, wait_for_previous
from shared.kernels.products.gemv import ACTIVATIONS, prefetch_weights, store_product
from shared.kernels.products.quantized_gemm import quantize_rows
from shared.kernels.products.quantized_rows import load_scales
from shared.kernels.products.quantized_tiling import STEP, QuantizedTiling
from shared.kernels.products.rmsnorm import Norm
from shared.ops import gated as gated_ops
from shared.quantization.weight import QuantizedWeight

FP8_ROWS = 8
"""Rows of x above which x is rounded to FP8: more than one request's default number of drafts plus its next token."""


@triton.jit
def add_columns(y, tile, x, scale_rows, group, GROUPS: tl.constexpr):
    """``y + W xᵀ`` over some columns, added up in fp32; scaled, unless the scales belong to rows."""
    total = tl.dot(tile, x.T)
    return y + total if GROUPS == 1 else y + total * load_scales(scale_rows, group, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def fp8_rows_kernel(
    x, x_scales, values, scales, bias, residual, out, partial, counters, num_rows, N, residual_stride, rows_per_scale,
    K: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes columns i · BLOCK_N … of ``out [num_rows, N]`` for up to BLOCK_M rows, from part j of K.

    x is contiguous ``[num_rows, K]``. With an activation W is ``[2N, K]``, as in ``gemv_kernel``. If there are several
    parts, the last program to arrive adds them all up, in order.
    """
    launch_dependents(PDL)
    PART: tl.constexpr = K // SPLITS
    GROUPS: tl.constexpr = K // GROUP
    block, split = tl.program_id(0), tl.program_id(1)
    first = split * PART
    m, n, k = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N), first + tl.arange(0, BLOCK_K)
    row = tl.minimum(n, N - 1)
    prefetch_weights(values + first, row, K, BLOCK_K, PREFETCHED, PDL)
    rows = values + row.to(tl.int64)[:, None] * K + k[None, :]
    scale_rows = scales + row // rows_per_scale * GROUPS
    up_rows, up_scale_rows = rows, scale_rows
    if ACTIVATION is not None:
        prefetch_weights(values + first, N + row, K, BLOCK_K, PREFETCHED, PDL)
        up_rows = values + (N + row).to(tl.int64)[:, None] * K + k[None, :]
        up_scale_rows = scales + (N + row) // rows_per_scale * GROUPS
    wait_for_previous(PDL)
    x_rows, is_x_row = x + m[:, None] * K + k[None, :], m < num_rows
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, PART, BLOCK_K):
        group = (first + start) // GROUP
        columns = tl.load(x_rows + start, mask=is_x_row[:, None], other=0.0, eviction_policy="evict_last")
        tile = tl.load(rows + start, eviction_policy="evict_first")
        y = add_columns(y, tile, columns, scale_rows, group, GROUPS)
        if ACTIVATION is not None:
            tile = tl.load(up_rows + start, eviction_policy="evict_first")
            up = add_columns(up, tile, columns, up_scale_rows, group, GROUPS)
    y, up, is_storing = sum_of_parts(y, up, partial, counters, block, split, SPLITS, ACTIVATION)
    if is_storing:
        x_scale = tl.load(x_scales + m, mask=is_x_row, other=0.0)[None, :]
        y *= x_scale if GROUPS > 1 else x_scale * load_scales(scale_rows, 0, 1.0)[:, None]
        if ACTIVATION is not None:
            up *= x_scale if GROUPS > 1 else x_scale * load_scales(up_scale_rows, 0, 1.0)[:, None]
        store_product(y, up, out, bias, residual, m[None, :], n[:, None], num_rows, N, residual_stride, ACTIVATION)


def fits(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether :func:`multiply_rows_in_fp8` supports an FP8 W with these groups, and rows of this dtype."""
    K = weight.shape[1]
    return x.element_size() == 2 and K % STEP == 0 and weight.columns_per_scale in (STEP, K)


def multiply_rows_in_fp8(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    activation: gated_ops.GatedOp | None,
    cut: QuantizedTiling,
) -> torch.Tensor:
    """``activation(norm(x) Wᵀ + b) + residual``, with a W in FP8 and ``norm(x)`` rounded to FP8.

    Args:
        x: ``[T, K]``, whose columns are contiguous, of at most ``cut.block_m`` rows.
    """
    (T, K), kinds = x.shape, 1 if activation is None else 2
    N = weight.shape[0] // kinds
    blocks_n = -(-N // cut.block_n)
    values, x_scales = quantize_rows(x, norm)
    out = x.new_empty(T, N)
    partial, counters = memory_of_parts(cut.splits, blocks_n, kinds * cut.block_n * cut.block_m, x.device)
    launch(
        fp8_rows_kernel, (blocks_n, cut.splits),
        values, x_scales, weight.values, weight.scales, bias, residual, out, partial, counters, T, N,
        0 if residual is None else residual.stride(0), weight.rows_per_scale,
        K=K, GROUP=weight.columns_per_scale, ACTIVATION=None if activation is None else ACTIVATIONS[activation][0],
        BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, SPLITS=cut.splits, PREFETCHED=cut.prefetched,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
