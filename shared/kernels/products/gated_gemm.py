"""Gate and up of many rows, with their activation as the epilogue, on Hopper. Introduced in phase 3.1.

cuBLAS writes gate and up of a prompt to memory, and the activation reads them back: each time 400 MB for 8,192 tokens
of Qwen3-8B. Here a program computes the gate and up values of a tile of 128 rows and 128 columns, so their activation
is applied in registers and only the result is written.

The product itself has to be as fast as cuBLAS's, so the warps have different tasks (*warp specialization*). One warp
loads tiles of x and W, several ahead. Two groups of warps multiply half of the rows of x each, and apply the
activation. A program computes one tile of the result after the other, so the next one's loads begin while the current
one ends.

It is written in Gluon (:mod:`shared.kernels.gluon`), which neither the interpreter nor every version of Triton runs.
Everything else takes PyTorch's product and the activation's own kernel.

A buffer has two barriers. Loads that have arrived complete a phase of ``full``; both groups that have read the buffer
complete a phase of ``empty``. The n-th use of a buffer waits for the n-th phase, of which a barrier keeps the parity.

Invariants: sums are fp32, and nothing is rounded before the result; a tile depends on its own rows and columns alone.
"""

import math
from typing import Any, NamedTuple

import torch

from shared.kernels.gluon import (
    COMPUTING,
    HAS_GLUON,
    LOADING,
    REGISTERS,
    barriers,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from shared.kernels.launch import generation, launch, launch_dependents, num_multiprocessors, wait_for_previous
from shared.kernels.products.gated import gated_activation

ROWS = gl.constexpr(128)
"""Rows of x in a tile, half of them for each group that multiplies: 64 are the fewest that four warps multiply
together."""
COLUMNS = gl.constexpr(128)
"""Columns of the result in a tile, so 256 rows of W, the most that one instruction multiplies. Every load is shared by
as many products as the registers can hold."""
DEPTH = gl.constexpr(64)  # columns of x and W in a buffer
STAGES = gl.constexpr(4)  # buffers, as many as fit beside the result
GROUP = gl.constexpr(16)
"""Tiles of rows that are computed with one tile of columns before the next one. So programs that run at the same time
need the same rows of x and W, and most of them find these in the L2 cache."""
LEAST_BUSY = 0.9
"""Minimum share of what whole rounds of all programs could compute. Below it PyTorch, which selects its tiles by shape,
is faster."""


class Buffers(NamedTuple):
    """Shared memory, and the barriers of its buffers."""

    x: Any
    w: Any
    full: Any
    empty: Any
    results: Any  # one for each group that multiplies


@gluon.jit
def arrived(num_read, buffers, HALF: gl.constexpr):
    """The buffer after ``num_read`` others, once it is full: its half of the rows of x, and W transposed."""
    stage = num_read % STAGES
    mbarrier.wait(buffers.full.index(stage), num_read // STAGES & 1)
    x = buffers.x.index(stage).slice(HALF * (ROWS // 2), ROWS // 2)
    return x, buffers.w.index(stage).permute((1, 0))


@gluon.jit
def find_tile(number, num_row_tiles, num_column_tiles):
    """The tile of rows and the tile of columns of this number. The tiles of ``GROUP`` tiles of rows follow one
    another, column by column."""
    in_group = GROUP * num_column_tiles
    first = number // in_group * GROUP
    size = gl.minimum(num_row_tiles - first, GROUP)
    return first + number % in_group % size, number % in_group // size


@gluon.jit
def load_tiles(x_tiles, w_tiles, num_row_tiles, num_column_tiles, N, K, buffers):
    """The task of the warp that loads. The rows of gate and up come one above the other into the same buffer."""
    BYTES: gl.constexpr = (ROWS + 2 * COLUMNS) * DEPTH * x_tiles.dtype.primitive_bitwidth // 8
    num_loaded = 0
    for number in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = find_tile(number, num_row_tiles, num_column_tiles)
        gate_row = column_tile * COLUMNS
        for k in range(0, K, DEPTH):
            stage = num_loaded % STAGES
            full, w = buffers.full.index(stage), buffers.w.index(stage)
            mbarrier.wait(buffers.empty.index(stage), (num_loaded // STAGES & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(x_tiles, [row_tile * ROWS, k], full, buffers.x.index(stage))
            tma.async_copy_global_to_shared(w_tiles, [gate_row, k], full, w.slice(0, COLUMNS))
            tma.async_copy_global_to_shared(w_tiles, [N + gate_row, k], full, w.slice(COLUMNS, COLUMNS))
            num_loaded += 1


@gluon.jit
def multiply(HALF: gl.constexpr, out_tiles, num_row_tiles, num_column_tiles, K, buffers, ACTIVATION: gl.constexpr):
    """The task of a group that multiplies, for the first or the second half of the rows of each tile."""
    OWN: gl.constexpr = ROWS // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    nothing = gl.zeros([OWN, 2 * COLUMNS], gl.float32, layout=SUMS)
    result = buffers.results.index(HALF)
    num_read = 0
    for number in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row_tile, column_tile = find_tile(number, num_row_tiles, num_column_tiles)
        x, w = arrived(num_read, buffers, HALF)
        sums = warpgroup_mma(x, w, warpgroup_mma_init(nothing), use_acc=False, is_async=True)
        for _ in range(DEPTH, K, DEPTH):
            x, w = arrived(num_read + 1, buffers, HALF)
            sums = warpgroup_mma(x, w, sums, is_async=True)
            sums = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=[sums]))
            mbarrier.arrive(buffers.empty.index(num_read % STAGES), count=1)  # the product before this one has ended
            num_read += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=[sums])
        mbarrier.arrive(buffers.empty.index(num_read % STAGES), count=1)
        num_read += 1

        gate, up = gl.split(total.reshape([OWN, 2, COLUMNS]).permute([0, 2, 1]))  # a thread has both of a column
        tma.store_wait(0)  # until the result before has been read from its buffer
        result.store(gated_activation(gate, up, ACTIVATION).to(result.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_tiles, [row_tile * ROWS + HALF * OWN, column_tile * COLUMNS], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_row_tiles", "num_column_tiles"])
def gated_gemm_kernel(
    out, out_tiles, x_tiles, w_tiles, num_row_tiles, num_column_tiles, N, K, ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The grid has a program for each multiprocessor, or for each tile of the result if those are fewer.

    ``out``: the result; only its tiles are used, but a launch takes its device from a tensor.
    """
    launch_dependents(PDL)
    dtype: gl.constexpr = x_tiles.dtype
    x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], x_tiles.layout)
    w = gl.allocate_shared_memory(dtype, [STAGES, 2 * COLUMNS, DEPTH], w_tiles.layout)
    results = gl.allocate_shared_memory(dtype, [2, ROWS // 2, COLUMNS], out_tiles.layout)
    buffers = Buffers(x, w, barriers(STAGES, 1), barriers(STAGES, 2), results)
    fence_async_shared()
    wait_for_previous(PDL)
    gl.warp_specialize(
        [
            (multiply, (gl.constexpr(0), out_tiles, num_row_tiles, num_column_tiles, K, buffers, ACTIVATION)),
            (multiply, (gl.constexpr(1), out_tiles, num_row_tiles, num_column_tiles, K, buffers, ACTIVATION)),
            (load_tiles, (x_tiles, w_tiles, num_row_tiles, num_column_tiles, N, K, buffers)),
        ],
        [4, 1],
        [COMPUTING, LOADING],
    )


def is_for(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`gated_gemm` can compute this product, and is faster than a product and an activation: the shapes
    have to keep its programs busy."""
    return can_compute(x, weight) and keeps_busy(len(x), len(weight) // 2, num_multiprocessors(x.device))


def can_compute(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the GPU has what the kernel needs, and rows begin at multiples of 16 bytes, as copies of tiles ask."""
    if not (HAS_GLUON and x.is_cuda and generation(x.device).has_warpgroups):
        return False
    is_known = x.dtype == weight.dtype in (torch.bfloat16, torch.float16) and x.shape[1] == weight.shape[1]
    is_aligned = all(matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 for matrix in (x, weight))
    return is_known and is_aligned and x.shape[1] % 8 == 0 == len(weight) % 16


def keeps_busy(num_rows: int, num_columns: int, num_programs: int) -> bool:
    """Whether a result of ``[num_rows, num_columns]`` fills the rounds that all programs need for its tiles."""
    row_tiles, column_tiles = tiles_of(num_rows, num_columns)
    rounds = max(1, -(-row_tiles * column_tiles // num_programs))
    return num_rows * num_columns >= LEAST_BUSY * rounds * num_programs * int(ROWS) * int(COLUMNS)


def tiles_of(num_rows: int, num_columns: int) -> tuple[int, int]:
    """The number of tiles of rows, and of columns."""
    return -(-num_rows // int(ROWS)), -(-num_columns // int(COLUMNS))


def gated_gemm(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(x Wᵀ)``, for arguments that :func:`can_compute` accepts.

    Args:
        x: ``[T, K]``.
        weight: ``[2N, K]``, the rows of the gate first.
        activation: the name that :func:`shared.kernels.products.gated.gated_activation` knows.

    Returns:
        ``[T, N]`` in the dtype of x.
    """
    (T, K), N = x.shape, len(weight) // 2
    out = x.new_empty(T, N)
    num_tiles = tiles_of(T, N)
    x_tiles, w_tiles = descriptor(x, [int(ROWS), int(DEPTH)]), descriptor(weight, [int(COLUMNS), int(DEPTH)])
    launch(
        gated_gemm_kernel, (min(num_multiprocessors(x.device), math.prod(num_tiles)),),
        out, descriptor(out, [int(ROWS) // 2, int(COLUMNS)]), x_tiles, w_tiles, *num_tiles, N, K,
        ACTIVATION=activation, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return out
