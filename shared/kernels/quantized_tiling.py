"""The tilings of products with a quantized matrix: a plain table, as :mod:`shared.kernels.tiling`.

Introduced in phase 10.

A thread loads 16 bytes at a time, which hold twice or four times as many columns as in 16 bits, so the tiles are
wider. Invariants: a tile has at least 16 bytes of a row of W; a tile for the tensor cores has no more columns than
share a scale; its stages fit in the shared memory of a program.
"""

import functools
from dataclasses import dataclass

from shared.kernels.launch import next_power_of_two
from shared.kernels.tiling import DOT_ROWS, Tiling

PROMPT_ROWS = 128  # of x, the most that a program multiplies at once
MAX_STAGES = 8


@dataclass(frozen=True)
class QuantizedTiling(Tiling):
    """A tiling of W, as the base class has it, and of x."""

    block_m: int = DOT_ROWS  # rows of x that a program of the matrix product multiplies at once
    x_first: bool = False  # x is the first operand of the tensor cores, and W the second
    pieces: int = 0  # of a tile's columns, each multiplied by warps of its own


@functools.cache
def quantized_tiling(
    rows: int, N: int, K: int, bits: int, columns_per_scale: int, is_gated: bool, itemsize: int, shared_bytes: int
) -> QuantizedTiling:
    """The tiling for ``rows`` rows of x, with elements of ``itemsize`` bytes, and W ``[N, K]`` (gated: ``[2N, K]``).

    ``shared_bytes``: shared memory of a program, ``launch.generation(device).shared_bytes``.
    """
    if rows == 1:
        return vector_tiling(N, K, bits, is_gated)
    block_m = max(DOT_ROWS, min(PROMPT_ROWS, next_power_of_two(rows)))
    is_grouped = columns_per_scale < K
    if block_m == PROMPT_ROWS:
        block_n, block_bytes, num_warps, stages = 128, 64 * bits // 8, 8, 4
    elif is_gated or N >= 8192:
        block_n, block_bytes, num_warps, stages = 64, 128, 4, MAX_STAGES
    else:
        block_n, block_bytes, num_warps, stages = 32, 256, 4, MAX_STAGES
    block_k = max(16, block_bytes) * 8 // bits
    pieces = 0
    if block_m == DOT_ROWS:
        block_n = 32 if is_gated or N >= 8192 else 16
        pieces = 4
        block_k = min(512, 4 * columns_per_scale) if is_grouped else 512
        num_warps = 4
        stages = 4
    elif is_grouped:
        block_k = min(block_k, columns_per_scale)

    def stage_bytes() -> int:
        return (2 if is_gated else 1) * block_n * block_k * bits // 8 + block_m * block_k * itemsize

    while pieces == 0 and block_k > 32 * 8 // bits and 3 * stage_bytes() > shared_bytes:
        block_k //= 2
    while block_n > 16 and 2 * stage_bytes() > shared_bytes:
        block_n //= 2
    num_stages = max(1, min(stages, shared_bytes // stage_bytes()))
    prefetched = 2 if block_m == DOT_ROWS else 0
    return QuantizedTiling(
        block_n, block_k, num_warps, num_stages, True, prefetched, block_m, block_m == DOT_ROWS, pieces
    )


def vector_tiling(N: int, K: int, bits: int, is_gated: bool) -> QuantizedTiling:
    """The tiling for one row of x: a program has about 8,000 bytes of W in flight."""
    block_k = min(next_power_of_two(K), 2048 if bits == 8 else 4096)
    block_n = 1 if N < 1024 else 2 if is_gated else 4
    return QuantizedTiling(block_n, max(32, block_k), 4)
