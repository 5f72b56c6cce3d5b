"""Merges partial attention states: in a second launch, or in the last program to arrive. Introduced in phase 6.1.

If the keys of one query are split over several programs, each stores a state: its output and the logarithm of its sum
of weights (FlashInfer, arXiv 2501.01005; :mod:`shared.attention.states` has the formula). They are merged in one of two
ways. :func:`merge_states` is a second launch, with a program for every row that has several splits. Or the last program
to arrive calls :func:`merged_state`, which saves the launch but reads all states of its heads through one
multiprocessor.

Invariants: the order of merging depends on the number of states and the launch's size, never on timing; a state
without keys (logarithm -inf) changes nothing, and only such states give zeros; a row without states is not written,
since its program has stored the output.
"""

import torch

from shared.attention.states import merge_rows
from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous

MERGED_NUMBERS = 4096  # fp32 numbers of states that a program holds at a time
MOST_ROWS = 16  # up to this many rows have a program per head; larger launches have one per row
NUM_WARPS = 4


@triton.jit
def merged_state(
    partial, partial_log, begin, end, heads, is_head,
    HQ: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """States ``begin`` to ``end`` of ``heads [ROWS]``: ``[ROWS, D]``, zeros where no state has keys.

    MERGED lanes run in parallel, each over every MERGED-th state, and merge at the end. The loads bypass the L1 cache,
    which may hold values older than the other programs' stores.
    """
    d = tl.arange(0, D)
    maximum = tl.full([MERGED, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGED, ROWS], tl.float32)
    weighted = tl.zeros([MERGED, ROWS, D], tl.float32)
    for first in tl.range(begin, end, MERGED):
        state = first + tl.arange(0, MERGED)
        row = state.to(tl.int64)[:, None] * HQ + heads[None, :]  # [MERGED, ROWS]
        is_state = (state < end)[:, None] & is_head[None, :]
        parts = tl.load(
            partial + row[:, :, None] * D + d[None, None, :], mask=is_state[:, :, None], other=0.0, cache_modifier=".cg"
        )  # [MERGED, ROWS, D]
        logs = tl.load(partial_log + row, mask=is_state, other=float("-inf"), cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, logs)
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # -inf - -inf is NaN
        weights = tl.exp2(logs - finite)
        kept = tl.exp2(maximum - finite)
        total = total * kept + weights
        weighted = weighted * kept[:, :, None] + weights[:, :, None] * parts
        maximum = new_maximum
    largest = tl.max(maximum, 0)
    weights = tl.exp2(maximum - tl.where(largest == float("-inf"), 0.0, largest)[None, :])
    total_of_lanes = tl.sum(weights * total, 0)
    weighted_of_lanes = tl.sum(weights[:, :, None] * weighted, 0)
    return weighted_of_lanes / tl.where(total_of_lanes == 0.0, 1.0, total_of_lanes)[:, None]


@triton.jit
def merge_states_kernel(
    partial, partial_log, output_indptr, out,
    HQ: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) merges heads j · ROWS … of row i; the grid is (rows, ceil(HQ / ROWS))."""
    launch_dependents(PDL)
    row = tl.program_id(0)
    begin = tl.load(output_indptr + row)
    end = tl.load(output_indptr + row + 1)
    wait_for_previous(PDL)
    if begin < end:
        heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_head = heads < HQ
        result = merged_state(partial, partial_log, begin, end, heads, is_head, HQ, D, ROWS, MERGED)
        at = (row.to(tl.int64) * HQ + heads)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(out + at, result, mask=is_head[:, None])


def merge_states(
    partial: torch.Tensor, partial_log: torch.Tensor, output_indptr: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Merge each row's states into ``out``; rows without states are left unchanged.

    Args:
        partial: fp32 ``[states, Hq, D]``, attention over parts of the keys.
        partial_log: fp32 ``[states, Hq]``, the base-2 logarithm of each part's sum of weights; -inf: no keys.
        output_indptr: int32 ``[rows + 1]``; row i has the states from ``output_indptr[i]`` to ``output_indptr[i + 1]``.
        out: ``[rows, Hq, D]``, contiguous.

    Returns:
        ``out``.
    """
    num_rows, Hq, D = out.shape
    if len(output_indptr) != num_rows + 1:
        raise ValueError(f"{len(output_indptr)} offsets bound {len(output_indptr) - 1} rows of states, not {num_rows}")
    if not launches(out):
        return merge_rows(partial, partial_log, output_indptr, out)
    if num_rows:
        is_row = num_rows > MOST_ROWS
        rows = next_power_of_two(Hq) if is_row else 1
        launch(
            merge_states_kernel, (num_rows, -(-Hq // rows)),
            partial, partial_log, output_indptr, out,
            HQ=Hq, D=D, ROWS=rows, MERGED=max(1, MERGED_NUMBERS // (rows * D)), num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip
    return out
