"""Products with an 8- or 4-bit weight, fused with the operations before and after. Introduced in phase 10.

Decoding takes as long as reading W. So a W with half or a quarter of the bytes takes half or a quarter of the time, if
nothing else is read: a program loads the bytes and widens them in registers, and no 16-bit copy of W exists. One row of
x is multiplied by :func:`quantized_gemv_kernel`, with prologue and epilogue as in :mod:`shared.kernels.products.gemv`.
More rows are multiplied by :mod:`shared.kernels.products.quantized_rows`, :mod:`shared.kernels.products.fp8_rows`,
:mod:`shared.kernels.products.quantized_gemm` and :mod:`shared.kernels.products.quantized_prompts`.

A scale belongs to a row of W or to a group of its columns. Multiplying every weight by its scale would double the
arithmetic, and loading a scale for each weight would be worse. But ``Σ x (v - z) s = s (Σ x v - z Σ x)`` over columns
that share scale and zero. So a thread first sums over the 16 bytes of its load, and then scales the sum.

Invariants: W is read once. Sums are fp32 sums of exact products. Only a normed x is rounded before the result, and x is
rounded to FP8 where the tensor cores multiply it with a W in FP8.
"""

import torch

from shared.kernels.launch import (
    Generation,
    generation,
    launch,
    launch_dependents,
    launches,
    tl,
    triton,
    wait_for_previous,
)
from shared.kernels.products import quantized_prompts
from shared.kernels.products.fp8_rows import FP8_ROWS, fits, multiply_rows_in_fp8
from shared.kernels.products.gemv import ACTIVATIONS, load_vector, load_weights, normalized, store_product
from shared.kernels.products.quantized_gemm import multiply, multiply_in_fp8, stored
from shared.kernels.products.quantized_rows import multiply_rows
from shared.kernels.products.quantized_tiles import columns, widened
from shared.kernels.products.quantized_tiling import QuantizedTiling, fp8_rows_tiling, quantized_tiling
from shared.kernels.products.rmsnorm import Norm, rms_norm
from shared.kernels.products.tiling import MAX_ROWS
from shared.ops import gated as gated_ops
from shared.ops import quantized as op
from shared.quantization.weight import RUN, QuantizedWeight

GROUPS = (32, 64, 128)
MOST_TILES = 32  # of a row of W, over which the loop is unrolled; with 96, assembling a kernel took five minutes
PART = tl.constexpr(16)  # bytes of a row that a thread loads at once; their columns share a scale
RAISED = tl.constexpr(2.0**64)  # a factor of x, since four bits are read as a multiple of 2^-149
LOWERED = tl.constexpr(2.0**85)  # the factor of the sum that compensates for both


@triton.jit
def load_groups(
    of_groups, row, is_row, START: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, PER_GROUP: tl.constexpr
):
    """The values of ``of_groups [.., GROUPS]`` for the parts of rows from part START on: ``[BLOCK_N, PARTS]``.

    If a row has one group, ``[BLOCK_N, 1]``. PER_GROUP: the number of parts in a group. ``of_groups`` None: zeros of 8.
    """
    if of_groups is None:
        return tl.full([1, 1], 8.0, tl.float32)
    elif GROUPS == 1:
        return tl.load(of_groups + row[:, None], mask=is_row[:, None], other=0.0).to(tl.float32)
    else:
        group = (START + tl.arange(0, PARTS)) // PER_GROUP
        inside = is_row[:, None] & (group < GROUPS)[None, :]
        return tl.load(of_groups + row[:, None] * GROUPS + group[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_normed(x, norm_weight, inverse_rms, k, K: tl.constexpr, OFFSET: tl.constexpr):
    """Elements k of the row x, normed if there is a norm, in fp32."""
    h = load_vector(x, k, K)
    if norm_weight is not None:
        h = normalized(h, inverse_rms, load_vector(norm_weight, k, K) + OFFSET, x.dtype.element_ty)
    return h


@triton.jit
def load_by_word(x, norm_weight, inverse_rms, w, K: tl.constexpr, RUN: tl.constexpr, OFFSET: tl.constexpr):
    """The columns of x that correspond to words w of four-bit numbers: low and high halves, ``[WORDS, 4]`` each."""
    k = columns(4 * w, RUN, 4)[:, None] + tl.arange(0, 4)[None, :]
    low = load_normed(x, norm_weight, inverse_rms, k, K, OFFSET)
    return low, load_normed(x, norm_weight, inverse_rms, k + RUN // 2, K, OFFSET)


@triton.jit
def by_column(h):
    """The four columns of ``h [WORDS, 4]``."""
    even, odd = tl.split(h.reshape([h.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def times_bits(h, words, AT: tl.constexpr):
    """h times the four-bit numbers of words, starting at bit AT, times 2^-149.

    As the low bits of an fp32 number, n is n · 2^-149, or 16 n or 256 n times that if it is further to the left: no
    conversion, and rarely a shift. The factor of x that compensates for the position is the same for all rows of W. |h|
    must be below 2^63.
    """
    PLACE: tl.constexpr = AT if AT < 20 else AT - 20
    bits = words if AT < 20 else words >> 20
    return (h * (RAISED * 0.5**PLACE))[None, :] * (bits & (15 << PLACE)).to(tl.float32, bitcast=True)


@triton.jit
def part_sums(tile, low, high, zeros, BITS: tl.constexpr, PARTS: tl.constexpr):
    """``Σ x (v - z)`` of each part of a tile: ``[BLOCK_N, PARTS]``. The tile holds bytes or, with 4 bits, words."""
    if BITS == 8:
        products = low[None, :] * widened(tile, tl.float32)
        return tl.sum(products.reshape([tile.shape[0], PARTS, PART]), axis=2)
    else:
        words = tile.to(tl.uint32, bitcast=True)
        low_0, low_1, low_2, low_3 = by_column(low)
        high_0, high_1, high_2, high_3 = by_column(high)
        products = times_bits(low_0, words, 0)
        products += times_bits(high_0, words, 4)
        products += times_bits(low_1, words, 8)
        products += times_bits(high_1, words, 12)
        products += times_bits(low_2, words, 16)
        products += times_bits(high_2, words, 20)
        products += times_bits(low_3, words, 24)
        products += times_bits(high_3, words, 28)
        sums = tl.sum(products.reshape([tile.shape[0], PARTS, PART // 4]), axis=2) * LOWERED
        return sums - zeros * tl.sum((low + high).reshape([PARTS, PART]), axis=1)[None, :]


@triton.jit
def quantized_gemv_kernel(
    x, values, scales, zeros, bias, norm_weight, residual, out, N, rows_per_scale, eps,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes columns i · BLOCK_N … of ``out [1, N]``; the grid is ceil(N / BLOCK_N).

    GROUP: columns that share a scale. With an activation W is ``[2N, K]``, as in ``gemv_kernel``.
    """
    launch_dependents(PDL)
    BYTES: tl.constexpr = 1 if BITS == 8 else 4  # four-bit numbers are loaded as 32-bit words
    WIDTH: tl.constexpr = K * BITS // 8 // BYTES  # words or bytes of a row
    BLOCK_B: tl.constexpr = BLOCK_K * BITS // 8 // BYTES
    PARTS: tl.constexpr = BLOCK_B * BYTES // PART
    GROUPS: tl.constexpr = K // GROUP
    PER_GROUP: tl.constexpr = GROUP * BITS // 8 // PART
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < N
    b = tl.arange(0, BLOCK_B)
    rows = values + n.to(tl.int64)[:, None] * WIDTH
    scale_row = n // rows_per_scale
    tile = load_weights(rows, is_row, b, WIDTH, BLOCK_B)
    scale = load_groups(scales, scale_row, is_row, 0, PARTS, GROUPS, PER_GROUP)
    zero = load_groups(zeros, scale_row, is_row, 0, PARTS, GROUPS, PER_GROUP)
    if ACTIVATION is not None:
        up_rows = values + (N + n).to(tl.int64)[:, None] * WIDTH
        up_scale_row = (N + n) // rows_per_scale
        up_tile = load_weights(up_rows, is_row, b, WIDTH, BLOCK_B)
        up_scale = load_groups(scales, up_scale_row, is_row, 0, PARTS, GROUPS, PER_GROUP)
        up_zero = load_groups(zeros, up_scale_row, is_row, 0, PARTS, GROUPS, PER_GROUP)
    # As in gemv_kernel: the barrier keeps these loads above the wait.
    tl.debug_barrier()
    wait_for_previous(PDL)
    inverse_rms = 1.0
    if norm_weight is not None:
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            h = load_vector(x, start + tl.arange(0, BLOCK_K), K)
            squares += h * h
        inverse_rms = tl.rsqrt(tl.sum(squares) / K + eps)
    sums = tl.zeros([BLOCK_N, PARTS], tl.float32)
    up_sums = tl.zeros([BLOCK_N, PARTS], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK_B):
        if start > 0:
            tile = load_weights(rows, is_row, start + b, WIDTH, BLOCK_B)
            if ACTIVATION is not None:
                up_tile = load_weights(up_rows, is_row, start + b, WIDTH, BLOCK_B)
        if start > 0 and GROUPS > 1:
            scale = load_groups(scales, scale_row, is_row, start * BYTES // PART, PARTS, GROUPS, PER_GROUP)
            zero = load_groups(zeros, scale_row, is_row, start * BYTES // PART, PARTS, GROUPS, PER_GROUP)
            if ACTIVATION is not None:
                up_scale = load_groups(scales, up_scale_row, is_row, start * BYTES // PART, PARTS, GROUPS, PER_GROUP)
                up_zero = load_groups(zeros, up_scale_row, is_row, start * BYTES // PART, PARTS, GROUPS, PER_GROUP)
        if BITS == 8:
            low = load_normed(x, norm_weight, inverse_rms, start + b, K, OFFSET)
            high = low
        else:
            low, high = load_by_word(x, norm_weight, inverse_rms, start + b, K, RUN, OFFSET)
        sums_of_tile = part_sums(tile, low, high, zero, BITS, PARTS)
        sums += sums_of_tile if GROUPS == 1 else sums_of_tile * scale
        if ACTIVATION is not None:
            sums_of_tile = part_sums(up_tile, low, high, up_zero, BITS, PARTS)
            up_sums += sums_of_tile if GROUPS == 1 else sums_of_tile * up_scale
    y = tl.sum(sums, axis=1)
    if GROUPS == 1:
        y *= tl.sum(scale, axis=1)  # of one number
    up = tl.sum(up_sums, axis=1)
    if ACTIVATION is not None and GROUPS == 1:
        up *= tl.sum(up_scale, axis=1)
    store_product(y, up, out, bias, residual, 0, n, 1, N, 0, ACTIVATION)


def linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    activation: gated_ops.GatedOp | None = None,
    cut: QuantizedTiling | None = None,
) -> torch.Tensor:
    """``activation(norm(x) Wᵀ + b) + residual``; arguments and result as in
    :func:`shared.kernels.products.gemv.linear`.

    More than eight rows are multiplied in FP8, with x rounded to FP8 and one scale per row, if W is FP8 and the GPU
    multiplies FP8. Above 64 rows the groups of W do not matter; up to 64 they must be 128 columns or whole rows, and x
    must have 16 bits.

    Raises:
        ValueError: the weight does not fit x, or the kernels cannot read its format.
    """
    T, N = x.shape[0], weight.shape[0]
    check_weight(weight, x.shape[1])
    if not launches(x):
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, norm.offset)
        return _finished(op.linear(x, weight, bias), residual, activation)
    out_columns = N if activation is None else N // 2
    if T == 0:
        return x.new_empty(0, out_columns)
    gpu = generation(x.device)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    is_gated = activation is not None and T <= MAX_ROWS
    is_fp8 = gpu.has_fp8 and weight.values.dtype == torch.float8_e4m3fn
    is_fp8_rows = is_fp8 and FP8_ROWS < T <= MAX_ROWS and fits(x, weight)
    columns, K, group = out_columns if is_gated else N, x.shape[1], weight.columns_per_scale
    if cut is None and is_fp8_rows:
        cut = fp8_rows_tiling(T, columns, K, group, is_gated, gpu.shared_bytes)
    elif cut is None:
        cut = quantized_tiling(T, columns, K, weight.bits, group, is_gated, x.element_size(), gpu.shared_bytes)
    if not cut.dot:
        return _launch(x.contiguous(), weight, bias, norm, residual, activation, cut, gpu)
    x = x if x.stride(1) == 1 else x.contiguous()
    own_residual = residual if activation is None else None  # otherwise it is added after the activation
    if is_fp8_rows:
        return multiply_rows_in_fp8(x, weight, bias, norm, residual, activation, cut)
    if is_fp8 and T > MAX_ROWS:
        y = multiply_in_fp8(x, weight, bias, norm, own_residual, cut, gpu)
        return y if activation is None else _finished(y, residual, activation)
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps, norm.offset)
    if cut.splits:
        return multiply_rows(x, weight, stored(weight, gpu), bias, residual, activation, cut)
    if T <= MAX_ROWS:
        return multiply(x, weight, bias, residual, activation, cut, gpu)
    if quantized_prompts.is_faster(T, N, x):
        y = quantized_prompts.multiply_by_tiles(x, weight, stored(weight, gpu), bias, own_residual)
    else:
        y = multiply(x, weight, bias, own_residual, None, cut, gpu)
    return y if activation is None else _finished(y, residual, activation)


def rounds_prompts(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether x has so many rows that :func:`linear` rounds them to FP8 in a launch of their own."""
    is_fp8 = weight.values.dtype == torch.float8_e4m3fn
    return is_fp8 and len(x) > MAX_ROWS and launches(x) and generation(x.device).has_fp8


def gated_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: gated_ops.GatedOp,
) -> torch.Tensor:
    """``gated(gate, up) Wᵀ + b + residual`` of gate and up in x ``[T, 2K]``, where :func:`rounds_prompts` is true.

    One launch activates and rounds a row, which so is neither written nor read in 16 bits. The numbers are those of
    both launches. ``residual`` may be overwritten.
    """
    N, K = weight.shape
    check_weight(weight, x.shape[1] // 2)
    gpu = generation(x.device)
    cut = quantized_tiling(len(x), N, K, 8, weight.columns_per_scale, False, x.element_size(), gpu.shared_bytes)
    return multiply_in_fp8(x, weight, bias, None, residual, cut, gpu, gated)


def check_weight(weight: QuantizedWeight, K: int) -> None:
    """Raise ValueError if a weight does not fit rows of K numbers, or if the kernels cannot read its format."""
    if weight.shape[1] != K or not weight.values.is_contiguous() or not weight.scales.is_contiguous():
        raise ValueError(f"the weight must be contiguous [N, {K}]; its shape is {weight.shape}")
    group = weight.columns_per_scale
    if group != K and (K % group or group not in GROUPS):
        raise ValueError(f"a scale must belong to all {K} columns, or to {GROUPS} that divide them, not to {group}")
    if weight.bits == 4 and K % weight.run:
        raise ValueError(f"4 bits with a scale a row are packed by {RUN} columns, and {K} is not divisible by that")
    groups = (-(-weight.shape[0] // weight.rows_per_scale), K // group)
    if weight.scales.shape != groups or (weight.zeros is not None and weight.zeros.shape != groups):
        raise ValueError(
            f"the weight must have {groups} scales, and as many zeros if any; it has {weight.scales.shape}"
        )


def _finished(y: torch.Tensor, residual: torch.Tensor | None, activation: gated_ops.GatedOp | None) -> torch.Tensor:
    """Runs the epilogue as separate launches."""
    if activation is not None:
        half = y.shape[1] // 2
        _, gate_and_up = ACTIVATIONS[activation]
        y = gate_and_up(y[:, :half], y[:, half:])
    return y if residual is None else y.add_(residual)


def _launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    activation: gated_ops.GatedOp | None,
    cut: QuantizedTiling,
    gpu: Generation,
) -> torch.Tensor:
    T, K = x.shape
    if T > 1:
        raise ValueError(f"a tiling without dot is for one row of x, not for {T}")
    if MOST_TILES * cut.block_k < K:
        raise ValueError(
            f"a tiling cuts a row into at most {MOST_TILES} tiles, and {K} columns are more of {cut.block_k}"
        )
    N = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = x.new_empty(1, N)
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
    launch(
        quantized_gemv_kernel, (-(-N // cut.block_n),),
        x, stored(weight, gpu) if weight.bits == 8 else weight.values.view(torch.int32), weight.scales, weight.zeros,
        bias, norm_weight, residual, out, N, weight.rows_per_scale, eps,
        K=K, GROUP=weight.columns_per_scale, BITS=weight.bits, RUN=weight.run, OFFSET=offset,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation][0], BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out
