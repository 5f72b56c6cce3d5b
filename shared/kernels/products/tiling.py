"""The tilings of products with few rows: a plain table. Introduced in phase 3.1.

The fastest tiling depends on shape and GPU, and can be measured only among other kernels under a CUDA graph: an
autotuner that times single launches picks the wrong ones. So nothing is tuned at run time. All tilings give the same
results up to rounding, and a test or a benchmark may pass its own to ``gemv.linear``.

Invariants of the table: a gemv tiling for more than one row of x has ``block_k >= K``, since only the first tile of
each row of W stays in registers and W must be read once; the loads that a dot tiling keeps in flight, ``num_stages``
tiles of W and x, fit in the shared memory that the GPU gives a program.
"""

import functools
from dataclasses import dataclass

from shared.kernels.launch import next_power_of_two

MAX_ROWS = 64  # of x in the kernels of few rows
MAX_FP32_ROWS = 16  # rows of x in fp32, which is multiplied without tensor cores
DOT_ROWS = 16  # the fewest rows of x that tensor cores multiply; fewer are padded
FEW_PROGRAMS = 32  # of a product on tensor cores that leaves most of the memory bandwidth unused
MANY_PROGRAMS = 96  # which use it
SHORT_PART = 512  # columns; narrower matrices are not split
LONG_PART = 4096  # columns from which on adding up the parts costs less than it gains


@dataclass(frozen=True)
class Tiling:
    """The tiling of W: ``block_n`` rows per program, ``block_k`` columns at a time, and the kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    dot: bool = False  # gemv.skinny_kernel, else gemv.gemv_kernel
    prefetched: int = 0  # tiles of W that a program of gemv.skinny_kernel requests before x is written
    splits: int = 1  # parts of K, each for one program of gemv.skinny_kernel


@functools.cache
def tiling(rows: int, N: int, K: int, is_gated: bool, itemsize: int, shared_bytes: int) -> Tiling:
    """The tiling for ``rows`` rows of x and W ``[N, K]`` (gated: ``[2N, K]``) with elements of ``itemsize`` bytes.

    ``shared_bytes``: shared memory of a program, ``launch.generation(device).shared_bytes``.
    """
    if rows == 1:
        return gated_vector_tiling(K) if is_gated else vector_tiling(N, K)
    return dot_tiling(dot_rows(rows), N, K, is_gated, itemsize, shared_bytes)


def dot_rows(rows: int) -> int:
    """The number of rows in the tile that holds all rows of x."""
    return max(DOT_ROWS, next_power_of_two(rows))


def dot_tiling(x_rows: int, N: int, K: int, is_gated: bool, itemsize: int, shared_bytes: int) -> Tiling:
    """The tiling for a tile of ``x_rows`` rows of x: as many stages as fit, with tiles of 64 rows of W, the fewest that
    Hopper's tensor cores take as their first operand. A gated product reads two rows of W for each column.
    """
    block_n, block_bytes = 64, 256
    stage_rows = (2 if is_gated else 1) * block_n + x_rows
    if shared_bytes < 4 * stage_rows * block_bytes:
        block_bytes //= 2
    num_stages = min(4 if is_gated else 6, shared_bytes // (stage_rows * block_bytes))
    block_k = block_bytes // itemsize
    splits = 1 if is_gated else parts(-(-N // block_n), K, block_k)
    return Tiling(block_n, block_k, 4, num_stages, dot=True, prefetched=4, splits=splits)


def parts(blocks: int, K: int, block_k: int, few: int = FEW_PROGRAMS, many: int = MANY_PROGRAMS) -> int:
    """The number of parts of K, in whole tiles of ``block_k``, for a product with this many blocks of rows of W. K is
    split if there are few programs, or if there are not many and the parts are long."""
    splits = 1
    while splits < 8 and K % (2 * splits * block_k) == 0 and 2 * splits * SHORT_PART <= K:
        is_long = K // splits >= LONG_PART
        if blocks * splits > few and not (is_long and blocks * splits < many):
            break
        splits *= 2
    return splits


def vector_tiling(N: int, K: int) -> Tiling:
    """The tiling for one row of x: a program has 2,000 to 8,000 elements of W in flight."""
    if N >= 65536:
        return Tiling(8, 1024, 8) if K % 1024 == 0 else Tiling(4, 512, 2)
    if K % 1024 == 0 and N > K:
        return Tiling(8, 1024, 4) if K == 1024 else Tiling(4, 1024, 2)
    if K % 1024 == 0:
        return Tiling(1, min(2048, K), 4)
    if N > K > 1024:
        return Tiling(4 if N >= 4096 else 2, 512, 2)
    return Tiling(2, min(2048, next_power_of_two(K)), 4)


def gated_vector_tiling(K: int) -> Tiling:
    """The tiling for one row of x and a W of gate and up rows, both of which are in flight."""
    if K in (1024, 2048, 4096):
        return Tiling(4, K, 2) if K == 1024 else Tiling(2, K, 4)
    return Tiling(2, 512, 2) if K % 512 == 0 else Tiling(1, min(1024, next_power_of_two(K)), 2)
