"""The tilings of products with a quantized matrix: a plain table, like :mod:`shared.kernels.products.tiling`.

Introduced in phase 10.

A thread loads 16 bytes at a time, which hold two or four times as many columns as in 16 bits, so the tiles are wider.
Invariants: a tile has at least 16 bytes of each row of W; a tile for the tensor cores, or each piece of it, has at most
as many columns as share a scale; its stages fit in the shared memory of a program.
"""

import functools
from dataclasses import dataclass

from shared.kernels.launch import next_power_of_two
from shared.kernels.products.tiling import DOT_ROWS, FEW_PROGRAMS, MANY_PROGRAMS, Tiling, parts

PROMPT_ROWS = 128  # of x; the most that a program multiplies at once
MAX_STAGES = 8
LEAST_WARPS = 1536  # for a few rows of x: twelve for each multiprocessor of a large GPU
STEP = 128  # columns that quantized_rows_kernel multiplies at once, and that share a scale


@dataclass(frozen=True)
class QuantizedTiling(Tiling):
    """A tiling of W, as in the base class, and of x."""

    splits: int = 0  # 0 for quantized_gemm_kernel, which does not split K
    block_m: int = DOT_ROWS  # rows of x that a program of the matrix product multiplies at once


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
    if block_m < PROMPT_ROWS and itemsize == 2 and K % STEP == 0 and columns_per_scale in (STEP, K):
        return rows_tiling(block_m, N, K, bits, is_gated, shared_bytes)
    if block_m == PROMPT_ROWS:
        block_n, block_bytes, num_warps, stages = 128, 64 * bits // 8, 8, 4
    elif is_gated or N >= 8192:
        block_n, block_bytes, num_warps, stages = 64, 128, 4, MAX_STAGES
    else:
        block_n, block_bytes, num_warps, stages = 32, 256, 4, MAX_STAGES
    block_k = max(16, block_bytes) * 8 // bits
    if is_grouped:
        block_k = min(block_k, columns_per_scale)
    if itemsize == 4:  # W is widened to fp32 and passes through shared memory
        block_k = min(block_k, STEP)

    def stage_bytes() -> int:
        return (2 if is_gated else 1) * block_n * block_k * bits // 8 + block_m * block_k * itemsize

    while block_k > 32 * 8 // bits and 3 * stage_bytes() > shared_bytes:
        block_k //= 2
    while block_n > 16 and 2 * stage_bytes() > shared_bytes:
        block_n //= 2
    num_stages = max(2, min(stages, shared_bytes // stage_bytes()))
    prefetched = num_stages if block_m == DOT_ROWS else 0
    return QuantizedTiling(block_n, block_k, num_warps, num_stages, True, prefetched, block_m=block_m)


def rows_tiling(block_m: int, N: int, K: int, bits: int, is_gated: bool, shared_bytes: int) -> QuantizedTiling:
    """The tiling for a few rows of x: enough programs to give every multiprocessor enough warps."""
    block_n, num_warps = (64, 4) if is_gated else (128, 8)
    has_two_steps = bits == 4 and block_m == DOT_ROWS and (is_gated or K > N) and K % (2 * STEP) == 0
    block_k = 2 * STEP if has_two_steps else STEP
    blocks = -(-N // block_n)
    splits = 1
    while blocks * splits * num_warps < LEAST_WARPS and splits < 8 and K % (2 * splits * block_k) == 0:
        splits *= 2
    stage_bytes = block_k * ((2 if is_gated else 1) * block_n * bits // 8 + 2 * block_m)
    num_stages = max(2, min(2 if is_gated and bits == 4 else 3, shared_bytes // 2 // stage_bytes))
    return QuantizedTiling(block_n, block_k, num_warps, num_stages, True, 4, splits, block_m)


def fp8_rows_tiling(
    rows: int, N: int, K: int, columns_per_scale: int, is_gated: bool, shared_bytes: int
) -> QuantizedTiling:
    """The tiling of :mod:`shared.kernels.products.fp8_rows`: the bytes in flight, not the warps, hide the reads."""
    block_m, block_n = max(DOT_ROWS, next_power_of_two(rows)), 64
    is_narrow = columns_per_scale < K or K % (2 * STEP) != 0 or (is_gated and block_m > DOT_ROWS)
    block_k = STEP if is_narrow else 2 * STEP
    splits = parts(-(-N // block_n), K, block_k, FEW_PROGRAMS // 2, MANY_PROGRAMS * (2 * STEP // block_k))
    stage_bytes = block_k * ((2 if is_gated else 1) * block_n + block_m)
    stages = 6 if not is_gated else 3 if block_m == DOT_ROWS else 4
    num_stages = max(2, min(stages, shared_bytes // stage_bytes))
    return QuantizedTiling(block_n, block_k, 4, num_stages, True, 0 if is_gated else 4, splits, block_m)


def vector_tiling(N: int, K: int, bits: int, is_gated: bool) -> QuantizedTiling:
    """The tiling for one row of x: a program has about 8,000 bytes of W in flight. It widens each x for several rows of
    W, which matters if W has 4 bits."""
    if bits == 8:
        block_k = min(next_power_of_two(K), 2048)
        block_n = 1 if N < 1024 else 2 if is_gated else 4
    else:
        block_k = min(next_power_of_two(K), 2048 if is_gated or K > N else 4096)
        block_n = 1 if N < 1024 else 4 if N < 4096 else 8
    return QuantizedTiling(block_n, max(32, block_k), 4)
