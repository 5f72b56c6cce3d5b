"""Products of prompts with an 8- or 4-bit weight, which is widened to 16 bits one tile of rows at a time.

Introduced in phase 10. A product of many rows is compute-bound: widening W in registers costs a third of the tensor
cores' time, since every program that multiplies a tile of W widens it again. If a tile is widened and scaled only once,
it goes through memory twice, but most of it stays in the L2 cache, and PyTorch multiplies it like any matrix.

Invariant: memory holds one tile in 16 bits, never a whole larger matrix.
"""

import torch

from shared.kernels.launch import launch, num_multiprocessors, tl, triton
from shared.kernels.products.quantized_tiles import columns, widened
from shared.kernels.products.quantized_tiling import PROMPT_ROWS
from shared.quantization.weight import QuantizedWeight

TILE_ROWS = 2048  # a multiple of the rows of an FP8 block; fewer do not occupy the GPU
LONG_ROWS = 8192  # columns of a row above which a tile has twice as many rows
BLOCK = 2048  # bytes of a row that a program widens
# rows of x: with fewer rows, writing the tiles of a matrix that occupies the GPU costs more than it saves
LEAST_ROWS = 256


@triton.jit
def dequantize_kernel(
    values, scales, zeros, out, rows_per_scale,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, n) writes the columns of bytes i · BLOCK … of row n to ``out [N, K]``."""
    WIDTH: tl.constexpr = K * BITS // 8
    row = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, is_inside = columns(b, RUN, BITS), b < WIDTH
    tile = tl.load(values + row * WIDTH + b, mask=is_inside, other=0, eviction_policy="evict_first")
    group = row // rows_per_scale * (K // GROUP) + k // GROUP
    scale = tl.load(scales + group, mask=is_inside, other=0.0).to(tl.float32)
    if BITS == 8:
        tl.store(out + row * K + k, widened(tile, tl.float32) * scale, mask=is_inside)
    else:
        zero = 8.0 if zeros is None else tl.load(zeros + group, mask=is_inside, other=0).to(tl.float32)
        tl.store(out + row * K + k, ((tile & 15).to(tl.float32) - zero) * scale, mask=is_inside)
        tl.store(out + row * K + k + RUN // 2, ((tile >> 4).to(tl.float32) - zero) * scale, mask=is_inside)


def is_faster(rows: int, N: int, x: torch.Tensor) -> bool:
    """Whether :func:`multiply_by_tiles` is faster than the widening product, for more rows than the decode kernels
    handle.

    The widening product has one program per 128 rows of W: with fewer programs than multiprocessors, most of the GPU
    idles.
    """
    return x.element_size() == 2 and (rows >= LEAST_ROWS or num_multiprocessors(x.device) > -(-N // PROMPT_ROWS))


def multiply_by_tiles(
    x: torch.Tensor,
    weight: QuantizedWeight,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """``x Wᵀ + b + residual`` of x ``[T, K]``: ``[T, N]``. W is rounded to the dtype of x after scaling.

    ``values``: the weight's, in the form that the kernels read on this GPU.
    """
    N, K = weight.shape
    rows = min(N, TILE_ROWS if K <= LONG_ROWS else 2 * TILE_ROWS)
    out, buffer = x.new_empty(x.shape[0], N), x.new_empty(rows, K)
    for start in range(0, N, rows):
        stop = min(N, start + rows)
        part, tile = weight.tile(start, stop), buffer[: stop - start]
        launch(
            dequantize_kernel, (-(-values.shape[1] // BLOCK), stop - start),
            values[start:stop], part.scales, part.zeros, tile, weight.rows_per_scale,
            K=K, GROUP=weight.columns_per_scale, BITS=weight.bits, RUN=weight.run, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        if residual is None:
            torch.mm(x, tile.t(), out=out[:, start:stop])
        else:
            torch.addmm(residual[:, start:stop], x, tile.t(), out=out[:, start:stop])
    return out if bias is None else out.add_(bias)
