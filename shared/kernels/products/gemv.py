"""Products of 1 to 64 rows with a weight matrix, fused with the operations before and after.

Introduced in phase 3.1.

Decoding multiplies every weight by the vectors of one or a few tokens; the lower bound is the time to read W once. The
overhead comes from vectors that go through memory between launches. So one launch computes

    out = epilogue(prologue(x) Wᵀ + b)      prologue: RMSNorm;  epilogue: a gated activation, or + residual

There are two kernels. In :func:`gemv_kernel` a program loads one or a few rows of W, 16 bytes per thread, and
multiplies them by one row of x at a time. Every program recomputes the prologue, since x is a few kilobytes and stays
in the cache. In :func:`skinny_kernel` a program loads more rows of W, in tiles that the tensor cores multiply by all
rows of x together: beyond a few rows, multiplying takes longer than reading. If W has few, long rows, several programs
share their columns. Then the norm is a separate launch: repeated in every program, the norm of several rows would take
longer. Above ``MAX_ROWS`` PyTorch computes the product, with separate kernels before and after it; on Hopper, gate and
up with their activation have a kernel of their own (:mod:`shared.kernels.products.gated_gemm`).

Both kernels request weights before they wait for the kernel that writes x (:mod:`shared.kernels.launch`), so that
memory is not idle between two products. The first loads a tile of W into registers; the second requests its first tiles
into the L2 cache, since its registers are needed for the product.

Invariants: with a tiling that follows the rules of its table, W is read once, whatever the number of rows; sums are
fp32; the normed x is rounded to its dtype, as if it had been written and read back; nothing else is rounded before the
result; from two rows on, a row's result depends on the tiling, not on the other rows.
"""

import torch
import torch.nn.functional as F

from shared.kernels.arrival import memory_of_parts, sum_of_parts
from shared.kernels.launch import (
    generation,
    launch,
    launch_dependents,
    launches,
    prefetch,
    tl,
    triton,
    wait_for_previous,
)
from shared.kernels.products import gated, gated_gemm
from shared.kernels.products.rmsnorm import Norm, rms_norm
from shared.kernels.products.tiling import MAX_FP32_ROWS, MAX_ROWS, Tiling, dot_rows, tiling
from shared.ops import gated as gated_ops

# for each op: its name in a kernel, and its own launcher
ACTIVATIONS: dict[gated_ops.GatedOp, tuple[str, gated_ops.GatedOp]] = {
    gated_ops.swiglu: ("silu", gated.swiglu),
    gated_ops.geglu: ("gelu_tanh", gated.geglu),
}


@triton.jit
def load_weights(rows, is_row, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k of rows of W: ``[BLOCK_N, BLOCK_K]``. They are read once, so they are evicted from the cache first."""
    inside = is_row[:, None] if K % BLOCK_K == 0 else is_row[:, None] & (k < K)[None, :]
    return tl.load(rows + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def prefetch_weights(weight, n, K: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr):
    """Request the first tiles of rows n of W into the L2 cache."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of a cache line of 128 bytes
    LINES: tl.constexpr = (BLOCK_K + LINE - 1) // LINE
    for start in tl.static_range(0, TILES * BLOCK_K, BLOCK_K):
        k = tl.minimum(start + tl.arange(0, LINES) * LINE, K - 1)
        prefetch(weight + n.to(tl.int64)[:, None] * K + k[None, :], PDL)


@triton.jit
def load_vector(x, k, K: tl.constexpr):
    """Elements k of a vector of K, in fp32. Every program reads them, so they are kept in the cache."""
    return tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def normalized(h, inverse_rms, scale, dtype: tl.constexpr):
    """``h · inverse_rms · scale`` as it would be read back from memory: rounded to the dtype of x, in fp32."""
    return (h * inverse_rms * scale).to(dtype).to(tl.float32)


@triton.jit
def load_x(x, m, k, num_rows, x_stride, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k of rows m of x, with zero padding: ``[ROWS, BLOCK_K]``."""
    is_row = (m < num_rows)[:, None]
    inside = is_row if K % BLOCK_K == 0 else is_row & (k < K)[None, :]
    return tl.load(x + m[:, None] * x_stride + k[None, :], mask=inside, other=0.0, eviction_policy="evict_last")


@triton.jit
def load_tile(rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Like :func:`load_weights`, for rows that W has: no masks are needed if K is a multiple of the tile's columns."""
    if K % BLOCK_K == 0:
        return tl.load(rows + k[None, :], eviction_policy="evict_first")
    else:
        return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def store_product(y, up, out, bias, residual, m, n, num_rows, N, residual_stride, ACTIVATION: tl.constexpr):
    """Store ``activation(y + b) + residual`` in rows m and columns n of ``out [num_rows, N]``.

    ``up``: the up values of the same columns, if there is an activation. m and n broadcast to the shape of y.
    """
    is_column = n < N
    if bias is not None:
        y += tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        if bias is not None:
            up += tl.load(bias + N + n, mask=is_column, other=0.0).to(tl.float32)
        y = gated.gated_activation(y, up, ACTIVATION)
    inside = (m < num_rows) & is_column
    if residual is not None:
        y += tl.load(residual + m * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, y, mask=inside)


@triton.jit
def gemv_kernel(
    x, weight, bias, norm_weight, residual, out, num_rows, N, x_stride, residual_stride, eps,
    K: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes columns i · BLOCK_N … of all rows of ``out [num_rows, N]``; the grid is ceil(N / BLOCK_N).

    With an activation W is ``[2N, K]``: row n gives the gate of column n, row N + n its up value.
    """
    launch_dependents(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < N
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * K
    up_rows = rows if ACTIVATION is None else weight + (N + n).to(tl.int64)[:, None] * K
    # The first tile stays in registers for all rows of x. The barrier keeps its loads above the wait and the norm, so
    # that they wait neither for the kernel that writes x nor for the norm's sum.
    first = load_weights(rows, is_row, k, K, BLOCK_K)
    if ACTIVATION is not None:
        first_up = load_weights(up_rows, is_row, k, K, BLOCK_K)
    if norm_weight is not None:
        first_scale = load_vector(norm_weight, k, K) + OFFSET
    tl.debug_barrier()
    wait_for_previous(PDL)
    for m in range(num_rows):
        row = x + m * x_stride
        h = load_vector(row, k, K)
        if norm_weight is not None:
            squares = h * h
            for start in tl.static_range(BLOCK_K, K, BLOCK_K):
                tile = load_vector(row, start + k, K)
                squares += tile * tile
            inverse_rms = tl.rsqrt(tl.sum(squares) / K + eps)
            h = normalized(h, inverse_rms, first_scale, x.dtype.element_ty)
        # exercise 03.1x3: a row of x times tiles of W, in fp32
        # hint: products is [BLOCK_N, BLOCK_K]: h[None, :] times a tile, widened before the multiplication
        # hint: further tiles begin at BLOCK_K, 2 BLOCK_K, ... below K: tl.static_range
        # hint: load_vector returns x before the norm; apply the norm, if there is one, as for h above
        products = h[None, :] * first.to(tl.float32)
        if ACTIVATION is not None:
            up_products = h[None, :] * first_up.to(tl.float32)
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            h = load_vector(row, start + k, K)
            if norm_weight is not None:
                scale = load_vector(norm_weight, start + k, K) + OFFSET
                h = normalized(h, inverse_rms, scale, x.dtype.element_ty)
            products += h[None, :] * load_weights(rows, is_row, start + k, K, BLOCK_K).to(tl.float32)
            if ACTIVATION is not None:
                up_products += h[None, :] * load_weights(up_rows, is_row, start + k, K, BLOCK_K).to(tl.float32)
        # end exercise
        y = tl.sum(products, axis=1)
        up = None if ACTIVATION is None else tl.sum(up_products, axis=1)
        store_product(y, up, out, bias, residual, m, n, num_rows, N, residual_stride, ACTIVATION)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x, weight, bias, residual, out, partial, counters, num_rows, N, x_stride, residual_stride,
    K: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Like :func:`gemv_kernel`, for up to ROWS rows of x at once, on the tensor cores (fp32: without them), and without
    a norm.

    W is the first operand, which Hopper's tensor cores read from shared memory, so a tile of W passes through no
    register. Program (i, j) multiplies part j of K; the last program of a block to arrive adds up the parts.
    """
    launch_dependents(PDL)
    PART: tl.constexpr = K // SPLITS
    block, split = tl.program_id(0), tl.program_id(1)
    first = split * PART
    m, n = tl.arange(0, ROWS), block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    rows = weight + row.to(tl.int64)[:, None] * K
    up_rows = rows
    prefetch_weights(weight + first, row, K, BLOCK_K, PREFETCHED, PDL)
    if ACTIVATION is not None:
        up_rows = weight + (N + row).to(tl.int64)[:, None] * K
        prefetch_weights(weight + first, N + row, K, BLOCK_K, PREFETCHED, PDL)
    wait_for_previous(PDL)
    y = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, PART, BLOCK_K):
        k = first + start + tl.arange(0, BLOCK_K)
        h = load_x(x, m, k, num_rows, x_stride, K, BLOCK_K)
        y = tl.dot(load_tile(rows, k, K, BLOCK_K), h.T, y, input_precision="ieee")
        if ACTIVATION is not None:
            up = tl.dot(load_tile(up_rows, k, K, BLOCK_K), h.T, up, input_precision="ieee")
    y, up, is_storing = sum_of_parts(y, up, partial, counters, block, split, SPLITS, ACTIVATION)
    if is_storing:
        store_product(y, up, out, bias, residual, m[None, :], n[:, None], num_rows, N, residual_stride, ACTIVATION)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    activation: gated_ops.GatedOp | None = None,
    cut: Tiling | None = None,
) -> torch.Tensor:
    """``activation(norm(x) Wᵀ + b) + residual``; everything except W may be absent.

    Args:
        x: ``[T, K]``; rows may be strided.
        weight: ``[N, K]``, contiguous; with an activation ``[2N, K]``, the rows of the gate first.
        bias: one number per row of W.
        norm: applied to x first.
        residual: ``[T, N]``; rows may be strided. It may be overwritten.
        activation: ``swiglu`` or ``geglu`` from ``shared.ops.gated``, applied to the first and the second half of the
            columns.
        cut: a tiling that replaces the table's, for measurements.

    Returns:
        ``[T, N]`` in the dtype of x.
    """
    T, K = x.shape
    N = weight.shape[0] if activation is None else weight.shape[0] // 2
    name, gate_and_up = (None, None) if activation is None else ACTIVATIONS[activation]
    max_rows = MAX_FP32_ROWS if x.dtype == torch.float32 else MAX_ROWS
    if not launches(x) or max_rows < T:
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, norm.offset)
        if residual is not None and bias is None and activation is None and launches(x):
            return residual.addmm_(x, weight.t())  # one launch instead of two for product and addition
        if name is not None and bias is None and gated_gemm.is_for(x, weight):
            y = gated_gemm.gated_gemm(x, weight, name)
        else:
            y = F.linear(x, weight, bias)
            if gate_and_up is not None:
                y = gate_and_up(y[:, :N], y[:, N:])
        return y if residual is None else y.add_(residual)
    if weight.shape[1] != K or not weight.is_contiguous():
        raise ValueError(f"the weight must be contiguous [N, {K}]; its shape is {weight.shape}, {weight.stride()}")
    out = x.new_empty(T, N)
    if T == 0:
        return out
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    cut = cut or tiling(T, N, K, activation is not None, x.element_size(), generation(x.device).shared_bytes)
    if cut.dot and norm is not None:
        x, norm = rms_norm(x, norm.weight, norm.eps, norm.offset), None
    x = x if x.stride(1) == 1 else x.contiguous()
    blocks = -(-N // cut.block_n)
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    options = {
        "K": K,
        "ACTIVATION": name,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }
    if cut.dot:
        if cut.splits > 1 and K % (cut.splits * cut.block_k):
            raise ValueError(f"{cut} is not for {K} columns: the parts must be whole tiles")
        num_rows, kinds = dot_rows(T), 1 if activation is None else 2
        partial, counters = memory_of_parts(cut.splits, blocks, kinds * cut.block_n * num_rows, x.device)
        launch(
            skinny_kernel, (blocks, cut.splits), x, weight, bias, residual, out, partial, counters, T, N, *strides,
            **options, ROWS=num_rows, SPLITS=cut.splits, PREFETCHED=cut.prefetched,
        )  # fmt: skip
    else:
        norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
        launch(
            gemv_kernel, (blocks,),
            x, weight, bias, norm_weight, residual, out, T, N, *strides, eps,
            **options, OFFSET=offset,
        )  # fmt: skip
    return out
