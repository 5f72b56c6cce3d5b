"""Products of several rows with an 8- or 4-bit weight on the tensor cores. Introduced in phase 10.

A program widens a tile of W in registers and multiplies it by rows of x: W is the first operand, which Hopper's tensor
cores read from registers, so the widened tile is never written to memory. Numbers of 8 and 4 bits are exact in fp16 and
bf16; it is their product with x that is scaled, once per group of columns, in fp32. For a few rows of x,
:mod:`shared.kernels.products.quantized_rows` is faster where it applies; for many,
:mod:`shared.kernels.products.quantized_prompts`.

If both W and x are FP8, the tensor cores multiply them directly, twice as fast. So with many rows, x is rounded to FP8,
with one scale per row (for several rows: :mod:`shared.kernels.products.fp8_rows`). If W's scales also belong to rows,
``torch._scaled_mm`` computes the product. With one scale per 128 columns, the kernel here adds up 128 columns at a
time. That also preserves precision, since Hopper's sums of FP8 products keep 14 bits (DeepSeek-V3, arXiv 2412.19437,
section 3.3.2).
"""

import torch

from shared.kernels.launch import (
    Generation,
    launch,
    launch_dependents,
    next_power_of_two,
    tl,
    triton,
    wait_for_previous,
)
from shared.kernels.products.gated import gated_activation
from shared.kernels.products.gemv import ACTIVATIONS, load_weights, prefetch_weights, store_product
from shared.kernels.products.quantized_tiles import columns, halves, widened
from shared.kernels.products.quantized_tiling import QuantizedTiling
from shared.kernels.products.rmsnorm import Norm, load_scale, normalize
from shared.ops import gated as gated_ops
from shared.quantization.weight import QuantizedWeight

BAND = tl.constexpr(16)  # blocks of rows of x whose programs run one after the other, so that x stays in the L2 cache
LARGEST_FP8 = tl.constexpr(448.0)
ROUNDED_TILE = 4096  # columns of a long row of whole tiles that are rounded at a time


@triton.jit
def load_x(rows, is_row, k, K: tl.constexpr, BLOCK: tl.constexpr):
    """Columns k of rows of x: ``[BLOCK_M, BLOCK]``."""
    inside = is_row[:, None] if K % BLOCK == 0 else is_row[:, None] & (k < K)[None, :]
    return tl.load(rows + k[None, :], mask=inside, other=0.0, eviction_policy="evict_last")


@triton.jit
def add_product(
    y, rows, is_row, low, high, scales, zeros, start,
    WIDTH: tl.constexpr, PER_GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """``y + W xᵀ`` of a tile of W and columns of x; scaled, unless the scales belong to rows. PER_GROUP: in bytes."""
    tile = load_weights(rows, is_row, start + tl.arange(0, BLOCK_B), WIDTH, BLOCK_B)
    group = start // PER_GROUP
    total = y if PER_GROUP == WIDTH else tl.zeros(y.shape, tl.float32)
    if BITS == 8:
        total = tl.dot(widened(tile, low.dtype), low.T, total, input_precision="ieee")
    else:
        zero = 8.0 if zeros is None else tl.load(zeros + group, mask=is_row, other=0).to(tl.float32)[:, None]
        low_tile, high_tile = halves(tile, zero, low.dtype)
        total = tl.dot(low_tile, low.T, total, input_precision="ieee")
        total = tl.dot(high_tile, high.T, total, input_precision="ieee")
    if PER_GROUP == WIDTH:
        return total
    else:
        return y + total * tl.load(scales + group, mask=is_row, other=0.0).to(tl.float32)[:, None]


@triton.jit
def quantized_gemm_kernel(
    x, x_scales, values, scales, zeros, bias, residual, out, num_rows, N, x_stride, residual_stride, rows_per_scale,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes ``out [num_rows, N]`` for BLOCK_M rows and BLOCK_N columns; the grid has one program per
    block.

    x_scales: one for each row of x, if x is FP8. With an activation W is ``[2N, K]``, as in ``gemv_kernel``.
    """
    launch_dependents(PDL)
    WIDTH: tl.constexpr = K * BITS // 8  # bytes of a row
    BLOCK_B: tl.constexpr = BLOCK_K * BITS // 8
    PER_GROUP: tl.constexpr = GROUP * BITS // 8
    GROUPS: tl.constexpr = K // GROUP
    blocks_n = tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(0) // (BAND * blocks_n) * BAND
    blocks_m = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first_m, BAND)
    in_band = tl.program_id(0) % (BAND * blocks_n)
    m = (first_m + in_band % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = in_band // blocks_m * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_x_row = n < N, m < num_rows
    rows = values + n.to(tl.int64)[:, None] * WIDTH
    group_row = n // rows_per_scale * GROUPS
    scale_rows = scales + group_row
    zero_rows = None if zeros is None else zeros + group_row
    if ACTIVATION is not None:
        up_rows = values + (N + n).to(tl.int64)[:, None] * WIDTH
        up_group_row = (N + n) // rows_per_scale * GROUPS
        up_scale_rows = scales + up_group_row
        up_zero_rows = None if zeros is None else zeros + up_group_row
    prefetch_weights(values, tl.minimum(n, N - 1), WIDTH, BLOCK_B, PREFETCHED, PDL)
    if ACTIVATION is not None:
        prefetch_weights(values, N + tl.minimum(n, N - 1), WIDTH, BLOCK_B, PREFETCHED, PDL)
    wait_for_previous(PDL)
    x_rows = x + m.to(tl.int64)[:, None] * x_stride
    y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_B):
        k = columns(start + tl.arange(0, BLOCK_B), RUN, BITS)
        low = load_x(x_rows, is_x_row, k, K, BLOCK_K)
        high = low if BITS == 8 else load_x(x_rows, is_x_row, k + RUN // 2, K, BLOCK_K)
        y = add_product(y, rows, is_row, low, high, scale_rows, zero_rows, start, WIDTH, PER_GROUP, BITS, BLOCK_B)
        if ACTIVATION is not None:
            up = add_product(
                up, up_rows, is_row, low, high, up_scale_rows, up_zero_rows, start, WIDTH, PER_GROUP, BITS, BLOCK_B
            )
    if GROUPS == 1:
        y *= tl.load(scale_rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if x_scales is not None:
        y *= tl.load(x_scales + m, mask=is_x_row, other=0.0)[None, :]
    if ACTIVATION is not None and GROUPS == 1:
        up *= tl.load(up_scale_rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    m, n = m.to(tl.int64)[None, :], n[:, None]
    store_product(y, up, out, bias, residual, m, n, num_rows, N, residual_stride, ACTIVATION)


@triton.jit
def quantize_rows_kernel(
    x, norm_weight, values, scales, x_stride, eps,
    K: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row of x, of its norm, or of its activation, in FP8, and its scale, which maps the row's largest number to
    FP8's largest. With an activation, a row of x is gate and up, 2K numbers. A row with a norm is one tile."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * x_stride
    k = tl.arange(0, TILE)
    if norm_weight is not None:
        tl.static_assert(TILE >= K)
        norm_scale = load_scale(norm_weight, k, K, OFFSET)
    wait_for_previous(PDL)
    tiles = ()  # of the row, which stays in registers
    peaks = tl.zeros([TILE], tl.float32)
    for start in tl.static_range(0, K, TILE):
        inside = start + k < K
        h = tl.load(x_row + start + k, mask=inside, other=0.0).to(tl.float32)
        # the norm and the activation are rounded as if they had been written and read back
        if norm_weight is not None:
            h = normalize(h, norm_scale, K, eps).to(x.dtype.element_ty).to(tl.float32)
        if ACTIVATION is not None:
            up = tl.load(x_row + K + start + k, mask=inside, other=0.0).to(tl.float32)
            h = gated_activation(h, up, ACTIVATION).to(x.dtype.element_ty).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(h))
        tiles = tiles + (h,)  # type: ignore[assignment]  # noqa: RUF005 - Triton does not unpack
    peak = tl.max(peaks)
    largest = tl.full([], LARGEST_FP8, tl.float32)
    tl.store(scales + row, tl.where(peak > 0.0, tl.div_rn(peak, largest), 1.0))
    factor = tl.where(peak > 0.0, tl.div_rn(largest, peak), 1.0)  # dividing each number would take a microsecond
    for i in tl.static_range(len(tiles)):
        column = i * TILE + k
        tl.store(values + row * K + column, (tiles[i] * factor).to(tl.float8e4nv), mask=column < K)


def stored(weight: QuantizedWeight, gpu: Generation) -> torch.Tensor:
    """The values as the kernels take them on this GPU: FP8 becomes bytes where the GPU has no FP8."""
    is_fp8 = weight.values.dtype == torch.float8_e4m3fn
    return weight.values.view(torch.uint8) if is_fp8 and not gpu.has_fp8 else weight.values


def quantize_rows(
    x: torch.Tensor, norm: Norm | None = None, gated: gated_ops.GatedOp | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x ``[T, K]``, or its norm, in FP8, and the scales of its rows ``[T]``, fp32. ``gated``: of x ``[T, 2K]``."""
    T, K = x.shape[0], x.shape[1] if gated is None else x.shape[1] // 2
    values = torch.empty(T, K, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(T, dtype=torch.float32, device=x.device)
    tile = ROUNDED_TILE if norm is None and K % ROUNDED_TILE == 0 else next_power_of_two(K)
    weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
    launch(
        quantize_rows_kernel, (T,), x, weight, values, scales, x.stride(0), eps,
        K=K, OFFSET=offset, ACTIVATION=None if gated is None else ACTIVATIONS[gated][0], TILE=tile,
        num_warps=min(16, max(4, tile // 512)),
    )  # fmt: skip
    return values, scales


def is_pytorchs(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Whether ``torch._scaled_mm`` multiplies x, rounded to FP8, with a W in FP8."""
    N, K = weight.shape
    has_row_scales = weight.columns_per_scale == K and weight.rows_per_scale in (1, N)
    return has_row_scales and x.dtype == torch.bfloat16 and N % 16 == K % 16 == 0


def multiply_in_fp8(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    cut: QuantizedTiling,
    gpu: Generation,
    gated: gated_ops.GatedOp | None = None,
) -> torch.Tensor:
    """``norm(x) Wᵀ + b + residual``, with a W in FP8 and ``norm(x)`` rounded to FP8; as :func:`multiply`.

    ``gated``: an activation of gate and up in x ``[T, 2K]``, in place of the norm.
    """
    values, x_scales = quantize_rows(x, norm, gated)
    if not is_pytorchs(x, weight):
        return multiply(values, weight, bias, residual, None, cut, gpu, x_scales, x.dtype)
    scales = weight.scales.float().expand(len(weight), 1).contiguous().t()
    y = torch._scaled_mm(
        values, weight.values.t(), x_scales[:, None], scales, bias=bias, out_dtype=x.dtype, use_fast_accum=True
    )
    return y if residual is None else y.add_(residual)


def multiply(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: gated_ops.GatedOp | None,
    cut: QuantizedTiling,
    gpu: Generation,
    x_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``activation(x Wᵀ + b) + residual`` of x ``[T, K]``, whose columns are contiguous: ``[T, N]``.

    Args:
        x_scales: the scales of the rows of x, if x is FP8.
        dtype: the dtype of the result; by default that of x.
    """
    T, K = x.shape
    if K > weight.columns_per_scale < cut.block_k:
        raise ValueError(f"a tiling of {cut.block_k} columns for {weight.columns_per_scale} that share a scale")
    N = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = torch.empty(T, N, dtype=dtype or x.dtype, device=x.device)
    shapes = (T, N, x.stride(0), 0 if residual is None else residual.stride(0), weight.rows_per_scale)
    options = {
        "K": K,
        "GROUP": weight.columns_per_scale,
        "BITS": weight.bits,
        "RUN": weight.run,
        "ACTIVATION": None if activation is None else ACTIVATIONS[activation][0],
        "BLOCK_M": cut.block_m,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
    }
    constants = {"PREFETCHED": cut.prefetched, "num_warps": cut.num_warps, "num_stages": cut.num_stages}
    of_w = (stored(weight, gpu), weight.scales, weight.zeros, bias, residual, out)
    blocks_n = -(-N // cut.block_n)
    blocks_m = -(-T // cut.block_m)
    launch(quantized_gemm_kernel, (blocks_n * blocks_m,), x, x_scales, *of_w, *shapes, **options, **constants)
    return out
