"""The tilings of products with few rows: a plain table. Introduced in phase 3.1.

The fastest tiling depends on shape and GPU, and can be measured only among other kernels, under a CUDA graph: an
autotuner that times single launches picks wrong ones. So nothing is tuned at run time. All tilings give the same
results up to rounding, and a test or a benchmark may pass its own to ``gemv.linear``.

Invariants of the table: a gemv tiling for more than one row of x has ``block_k >= K``, since only the first tile of
each row of W stays in registers, and W must be read once; the loads of a dot tiling in flight, ``num_stages`` tiles of
W and x, fit in the shared memory that the GPU gives a program.
"""

import functools
from dataclasses import dataclass

from shared.kernels.launch import next_power_of_two

MAX_ROWS = 16  # of x; PyTorch computes larger products
DOT_ROWS = 16  # rows of a tensor core's tile of x; fewer are padded
MAX_STAGES = 6


@dataclass(frozen=True)
class Tiling:
    """The tiling of W: ``block_n`` rows per program, ``block_k`` columns at a time, and the kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    dot: bool = False  # gemv.skinny_kernel, else gemv.gemv_kernel
    prefetched: int = 0  # tiles of W that a program of gemv.skinny_kernel requests before x is written


@functools.cache
def tiling(rows: int, N: int, K: int, is_gated: bool, itemsize: int, shared_bytes: int) -> Tiling:
    """The tiling for ``rows`` rows of x and W ``[N, K]`` (gated: ``[2N, K]``) with elements of ``itemsize`` bytes.

    ``shared_bytes``: shared memory of a program, ``launch.generation(device).shared_bytes``.
    """
    if rows == 1:
        return gated_vector_tiling(K) if is_gated else vector_tiling(N, K)
    return dot_tiling(N, K, is_gated, itemsize, shared_bytes)


def dot_tiling(N: int, K: int, is_gated: bool, itemsize: int, shared_bytes: int) -> Tiling:
    """The tiling for 2 to 16 rows of x: as many stages as fit.

    Few or long rows of W take wide tiles of few rows, so that there are enough programs. A gated product reads two rows
    of W for a column, so on a GPU with little shared memory it takes half as many columns.
    """
    if is_gated or (N >= 2048 and K <= 4096):
        block_n, block_bytes = 64, 256
    else:
        block_n, block_bytes = 32, 1024 if K > 4096 else 512
    if is_gated and shared_bytes < 4 * (2 * block_n + DOT_ROWS) * block_bytes:
        block_n //= 2
    stage_bytes = ((2 if is_gated else 1) * block_n + DOT_ROWS) * block_bytes
    num_stages = min(MAX_STAGES, shared_bytes // stage_bytes)
    return Tiling(block_n, block_bytes // itemsize, 4, num_stages, dot=True, prefetched=num_stages)


def vector_tiling(N: int, K: int) -> Tiling:
    """The tiling for one row of x: a program has about 4,000 elements of W in flight, whatever the shape."""
    whole = next_power_of_two(K)
    if N >= 65536:
        return Tiling(8, 1024, 8) if K % 1024 == 0 else Tiling(4, 512, 2)
    if whole <= 1024:
        return Tiling(2, whole, 4)
    if K > 4096:
        return Tiling(1, 4096, 2)
    if N > K:
        return Tiling(2, 1024, 4) if K % 1024 == 0 else Tiling(4 if N >= 4096 else 2, 512, 2)
    return Tiling(2, 2048, 4)


def gated_vector_tiling(K: int) -> Tiling:
    """The tiling for one row of x and a W of gate and up rows, both of which are in flight."""
    whole = next_power_of_two(K)
    return Tiling(1, 1024, 4) if K % 1024 == 0 else Tiling(1, min(whole, 1024), 2)
