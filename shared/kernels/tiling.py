"""How the products of few rows cut their weight matrix: a plain table. Introduced in phase 3.1.

The best cut depends on shape and chip, and shows only where the kernel runs among others, under a CUDA graph:
a tuner that times single launches picks wrong ones. So nothing is chosen at run time. The cuts stand here, any of them
gives the same results to a rounding, and a test or a measurement may pass its own to ``gemv.linear``.

Invariants, which the table keeps: a gemv cut for more than one row of x has ``block_k >= K``, since of each row of W
only the first tile stays in registers, and W shall be read once; what a dot cut has on its way, ``num_stages`` tiles of
W and x, fits the 99 KiB of shared memory that a program has on the smallest GPUs.
"""

import functools
from dataclasses import dataclass

from shared.kernels.launch import next_power_of_two

MAX_ROWS = 16  # of x; for more the product is PyTorch's


@dataclass(frozen=True)
class Tiling:
    """How a launch cuts W: ``block_n`` rows a program, ``block_k`` columns at a time, and by which kernel."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    dot: bool = False  # gemv.skinny_kernel, else gemv.gemv_kernel


@functools.cache
def tiling(rows: int, N: int, K: int, is_gated: bool, itemsize: int) -> Tiling:
    """The tiling for ``rows`` rows of x and W ``[N, K]`` (gated: ``[2N, K]``) of numbers of ``itemsize`` bytes."""
    if rows == 1:
        return gated_vector_tiling(K) if is_gated else vector_tiling(N, K)
    block_n = 16 if N <= 4096 else 64 if N >= 65536 and not is_gated else 32
    block_bytes = 512 if block_n == 16 or (block_n == 32 and not is_gated) else 256
    return Tiling(block_n, block_bytes // itemsize, 4, num_stages=4, dot=True)


def vector_tiling(N: int, K: int) -> Tiling:
    """The tiling for one row of x: a program has some 4,000 numbers of W on their way, whatever the shape."""
    whole = next_power_of_two(K)
    if N >= 65536:
        return Tiling(8, 1024, 8) if K % 1024 == 0 else Tiling(4, 512, 2)
    if whole <= 1024:
        return Tiling(2, whole, 4)
    if K > 4096:
        return Tiling(1, 4096, 2)
    if N > K:
        return Tiling(4 if N >= 4096 else 2, 512, 2)
    return Tiling(2, 2048, 4)


def gated_vector_tiling(K: int) -> Tiling:
    """The tiling for one row of x where W holds a gate's row for each other row, and both are on their way."""
    whole = next_power_of_two(K)
    if K % 1024 == 0:
        return Tiling(2, 1024, 4)
    return Tiling(1, min(whole, 1024), 2)
