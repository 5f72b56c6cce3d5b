"""A gated low-rank addition's second product, in one launch. Introduced in phase 11.1.

The first product, A x, needs no extra launch: A's rows are appended to those of W, so the product that reads W computes
it too. The second has an inner dimension of only 16, so its launch dominates its time. So this kernel also performs the
operations that follow: the gate, the sum, and the activation or the residual.

Invariant: sums are fp32 and rounded once; a token whose gate is closed gets the columns of W x bit for bit.
"""

from torch import Tensor

from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous
from shared.kernels.products.gated import gated_activation
from shared.kernels.products.gemv import ACTIVATIONS
from shared.ops.gated import GatedOp
from shared.tracks.multi_token import low_rank as op

ROWS = 16  # tokens per program, the minimum of a tensor core's tile
BLOCK = 64  # columns per program


@triton.jit
def low_rank_kernel(
    y, b, gate, residual, out, num_rows, N, y_stride, residual_stride, scale,
    RANK: tl.constexpr, RANKS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """N columns of the result; RANKS is RANK, or larger if the tensor cores need it."""
    launch_dependents(PDL)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANKS)
    is_row = m < num_rows
    is_column = n < N
    inside = is_row[:, None] & is_column[None, :]
    of_b = is_column[:, None] & (r < RANK)[None, :]
    columns = tl.load(b + n.to(tl.int64)[:, None] * RANK + r[None, :], mask=of_b, other=0.0)
    wait_for_previous(PDL)
    rows = y + m.to(tl.int64)[:, None] * y_stride
    width = N if ACTIVATION is None else 2 * N
    low = tl.load(rows + width + r[None, :], mask=is_row[:, None] & (r < RANK)[None, :], other=0.0)
    opening = tl.load(gate + m, mask=is_row, other=0.0).to(tl.float32) * scale
    added = tl.dot(low, columns.T, input_precision="ieee")
    result = tl.load(rows + n[None, :], mask=inside, other=0.0).to(tl.float32) + opening[:, None] * added
    if ACTIVATION is not None:
        columns = tl.load(b + (N + n).to(tl.int64)[:, None] * RANK + r[None, :], mask=of_b, other=0.0)
        added = tl.dot(low, columns.T, input_precision="ieee")
        up = tl.load(rows + N + n[None, :], mask=inside, other=0.0).to(tl.float32) + opening[:, None] * added
        result = gated_activation(result, up, ACTIVATION)
    if residual is not None:
        at = residual + m.to(tl.int64)[:, None] * residual_stride + n[None, :]
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], result, mask=inside)


def add_low_rank(
    y: Tensor, b: Tensor, gate: Tensor, scale: float, residual: Tensor | None = None, activation: GatedOp | None = None
) -> Tensor:
    """See ``shared.tracks.multi_token.low_rank``; b has the dtype of y, and rows of y and residual are contiguous."""
    if not launches(y):
        return op.add_low_rank(y, b, gate, scale, residual, activation)
    T, N, rank = len(y), len(b) // (1 if activation is None else 2), b.shape[1]
    out = y.new_empty(T, N)
    if T == 0:
        return out
    launch(
        low_rank_kernel, (-(-N // BLOCK), -(-T // ROWS)),
        y, b, gate, residual, out, T, N, y.stride(0), 0 if residual is None else residual.stride(0), scale,
        RANK=rank, RANKS=max(16, next_power_of_two(rank)),
        ACTIVATION=None if activation is None else ACTIVATIONS[activation][0], ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
