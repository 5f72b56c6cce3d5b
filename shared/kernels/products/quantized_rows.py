"""Products of a few rows with an 8- or 4-bit weight on the tensor cores. Introduced in phase 10.

The time is that of reading W, if nothing delays it. Three things could: moving a widened tile through shared memory
again; waiting for a scale every 128 columns; and having few warps, each of which waits for its own instructions. So the
bytes of W are loaded many tiles ahead, and each thread widens what it has loaded; the product is given the
corresponding rows and columns (:func:`shared.kernels.products.quantized_tiles.as_operand`). The values of a group
(scales, zeros) are loaded one step early. And several programs share the columns of a row, so that every multiprocessor
has many warps.

Marlin (Frantar et al., arXiv 2408.11743) permutes the stored weights for the same purpose. Here they are stored
unpermuted, and :mod:`shared.kernels.products.quantized_gemv` reads them as well. Invariants: W is read once; sums are
fp32, and those of several programs are added in the order of the columns; counters are zero between launches.
"""

import torch

from shared.kernels.arrival import memory_of_parts, sum_of_parts
from shared.kernels.launch import launch, launch_dependents, tl, triton, wait_for_previous
from shared.kernels.products.gemv import ACTIVATIONS, prefetch_weights, store_product
from shared.kernels.products.quantized_tiles import as_operand, halves, loaded_row, operand_column, widened
from shared.kernels.products.quantized_tiling import STEP, QuantizedTiling
from shared.ops import gated as gated_ops
from shared.quantization.weight import QuantizedWeight


@triton.jit
def load_step(rows, start, S: tl.constexpr):
    """128 columns of rows of W: ``[S, BLOCK_N, 64]`` bytes."""
    at = tl.arange(0, S)[:, None, None] * 64 + tl.arange(0, 64)[None, None, :]
    return tl.load(rows[None, :, None] + start + at, eviction_policy="evict_first")


@triton.jit
def load_scales(of_groups, group, DEFAULT: tl.constexpr):
    """The values of a group of rows of W; without zeros, 8."""
    if of_groups is None:
        return tl.full([1], DEFAULT, tl.float32)
    else:
        return tl.load(of_groups + group).to(tl.float32)


@triton.jit
def add_step(y, tile, low, high, scale, zero, GROUPS: tl.constexpr, BITS: tl.constexpr, WARPS: tl.constexpr):
    """``y + W xᵀ`` of 128 columns that share a scale; scaled, unless the scales belong to rows."""
    tile = as_operand(tile, WARPS)
    total = y if GROUPS == 1 else tl.zeros(y.shape, tl.float32)
    if BITS == 8:
        total = tl.dot(widened(tile, low.dtype), low.T, total, input_precision="ieee")
    else:
        low_tile, high_tile = halves(tile, zero[:, None], low.dtype)
        total = tl.dot(low_tile, low.T, total, input_precision="ieee")
        total = tl.dot(high_tile, high.T, total, input_precision="ieee")
    return total if GROUPS == 1 else y + total * scale[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def quantized_rows_kernel(
    x, values, scales, zeros, bias, residual, out, partial, counters, num_rows, N, x_stride, residual_stride,
    rows_per_scale,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr, PREFETCHED: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes columns i · BLOCK_N … of ``out [num_rows, N]`` for up to BLOCK_M rows, from part j of K.

    The bytes of W go through shared memory unchanged, many tiles ahead, and each thread reads from there what it widens
    for the tensor cores (:func:`as_operand`). A step is 128 columns; an iteration is STEPS steps. If there are several
    parts, the last program to arrive adds them all up, in order. If ``num_rows`` is known to be a multiple of 16, the
    compiler orders the instructions of two products differently, which takes up to 15 % longer.
    """
    launch_dependents(PDL)
    WIDTH: tl.constexpr = K * BITS // 8  # bytes of a row
    PART: tl.constexpr = WIDTH // SPLITS
    STEP: tl.constexpr = 16 * BITS
    S: tl.constexpr = STEP // 64
    GROUPS: tl.constexpr = K // GROUP
    block, split = tl.program_id(0), tl.program_id(1)
    first = split * PART
    m, n = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N)
    loaded = tl.minimum(block * BLOCK_N + loaded_row(tl.arange(0, BLOCK_N), WARPS), N - 1)
    row = tl.minimum(n, N - 1)
    rows = values + loaded.to(tl.int64) * WIDTH + first
    scale_rows = scales + row // rows_per_scale * GROUPS
    zero_rows = None if zeros is None else zeros + row // rows_per_scale * GROUPS
    prefetch_weights(values + first, row, WIDTH, STEP, PREFETCHED, PDL)
    up_rows = rows
    up_scale_rows = scale_rows
    up_zero_rows = zero_rows
    if ACTIVATION is not None:
        up_rows += N.to(tl.int64) * WIDTH
        up_scale_rows = scales + (N + row) // rows_per_scale * GROUPS
        up_zero_rows = None if zeros is None else zeros + (N + row) // rows_per_scale * GROUPS
        prefetch_weights(values + first, N + row, WIDTH, STEP, PREFETCHED, PDL)
    # The values of a group are loaded one step before they are used.
    group = first // STEP if GROUPS > 1 else 0
    scale, zero = load_scales(scale_rows, group, 1.0), load_scales(zero_rows, group, 8.0)
    up_scale, up_zero = load_scales(up_scale_rows, group, 1.0), load_scales(up_zero_rows, group, 8.0)
    wait_for_previous(PDL)
    x_rows = x + m[:, None] * x_stride + operand_column(tl.arange(0, 64 * S), BITS)[None, :]
    is_x_row = (m < num_rows)[:, None]
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(0, PART, STEP * STEPS):
        for step in tl.static_range(STEPS):
            start = begin + step * STEP
            k = (first + start) * 8 // BITS
            tile = load_step(rows, start, S)
            low = tl.load(x_rows + k, mask=is_x_row, other=0.0, eviction_policy="evict_last")
            high = low
            if BITS == 4:
                high = tl.load(x_rows + k + 64, mask=is_x_row, other=0.0, eviction_policy="evict_last")
            if ACTIVATION is not None:
                up_tile = load_step(up_rows, start, S)
            this_zero, this_up_zero = zero, up_zero
            group = tl.minimum(k // 128 + 1, GROUPS - 1)
            if GROUPS > 1:
                zero, up_zero = load_scales(zero_rows, group, 8.0), load_scales(up_zero_rows, group, 8.0)
            y = add_step(y, tile, low, high, scale, this_zero, GROUPS, BITS, WARPS)
            if ACTIVATION is not None:
                up = add_step(up, up_tile, low, high, up_scale, this_up_zero, GROUPS, BITS, WARPS)
            if GROUPS > 1:  # a scale is the last thing that a step needs, so its register becomes free only now
                scale, up_scale = load_scales(scale_rows, group, 1.0), load_scales(up_scale_rows, group, 1.0)
    y, up, is_storing = sum_of_parts(y, up, partial, counters, block, split, SPLITS, ACTIVATION)
    if is_storing:
        if GROUPS == 1:
            y *= load_scales(scale_rows, 0, 1.0)[:, None]
        if ACTIVATION is not None and GROUPS == 1:
            up *= load_scales(up_scale_rows, 0, 1.0)[:, None]
        columns, rows_of_x = n[:, None], m[None, :]
        store_product(y, up, out, bias, residual, rows_of_x, columns, num_rows, N, residual_stride, ACTIVATION)


def multiply_rows(
    x: torch.Tensor,
    weight: QuantizedWeight,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: gated_ops.GatedOp | None,
    cut: QuantizedTiling,
) -> torch.Tensor:
    """``activation(x Wᵀ + b) + residual`` of x ``[T, K]``, whose columns are contiguous: ``[T, N]``.

    ``values``: of the weight, as the kernels take them on this GPU.
    """
    T, K = x.shape
    if cut.block_m < T or K % (cut.splits * cut.block_k) or weight.columns_per_scale not in (STEP, K):
        raise ValueError(f"{cut} is not for {T} rows of {K} columns, {weight.columns_per_scale} of which share a scale")
    kinds = 1 if activation is None else 2
    N = weight.shape[0] // kinds
    blocks_n = -(-N // cut.block_n)
    out = x.new_empty(T, N)
    partial, counters = memory_of_parts(cut.splits, blocks_n, kinds * cut.block_n * cut.block_m, x.device)
    launch(
        quantized_rows_kernel, (blocks_n, cut.splits),
        x, values, weight.scales, weight.zeros, bias, residual, out, partial, counters, T, N, x.stride(0),
        0 if residual is None else residual.stride(0), weight.rows_per_scale,
        K=K, GROUP=weight.columns_per_scale, BITS=weight.bits,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation][0], BLOCK_M=cut.block_m, BLOCK_N=cut.block_n,
        SPLITS=cut.splits, STEPS=cut.block_k // STEP, PREFETCHED=cut.prefetched, WARPS=cut.num_warps,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
