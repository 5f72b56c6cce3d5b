"""Decode attention that follows a plan: ``planned``. Introduced in phase 6.1.

The plan assigns keys to programs, once for all layers (:mod:`shared.attention.plan`, after FlashInfer, arXiv
2501.01005). A program computes an item, a split of one sequence's keys, for one KV head and the query heads that share
it. Everything that differs between steps is in index arrays on the device, so a captured launch serves every plan
within its capacity.

The tensor cores multiply 16 rows of queries at a time, and a group has fewer, so its rows are padded. Packing the
queries of several KV heads instead was tried and was not faster (docs/EXPERIMENTS.md).

Invariants: only a sequence's visible keys are read, so other slots of the pool may hold anything; an item past the
plan's valid count returns at once; a result does not depend on which program arrives last; a sequence of length 0 gives
zeros; the counters are zero between launches; the plan, lengths and tables are uploaded before the step's first kernel,
so they are read above the wait (:mod:`shared.kernels.launch`).
"""

import torch

from shared.attention.descriptor import DevicePlan
from shared.kernels.arrival import is_last_arrival
from shared.kernels.attention.decode_attention import NO_WINDOW, in_base_2
from shared.kernels.attention.merge_states import merge_states, merged_state
from shared.kernels.attention.online_softmax import attend
from shared.kernels.attention.paged_attention import attend_by_sequence, token_rows
from shared.kernels.attention.planned_tiling import DecodeTiling
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.launch import launch, launch_dependents, launches, next_power_of_two, tl, triton, wait_for_previous

DOT_ROWS = 16  # rows of a tensor core's tile; smaller groups are padded


@triton.jit
def planned_decode_kernel(
    q, keys, values, tables, table_starts, lengths, k_scales, v_scales, num_items, split_size, request_indices,
    kv_tile_indices, output_indptr, out, partial, partial_log, counters, scale, softcap, window, q_row_stride,
    q_head_stride,
    BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, IS_ARRIVAL: tl.constexpr, MERGED: tl.constexpr, MERGED_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes item j for KV head i; the grid is (Hkv, capacity)."""
    launch_dependents(PDL)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    is_item = item < tl.load(num_items)
    # programs past the last item look up request 0: every program looks up some item, and waits
    request = tl.load(request_indices + item)
    kv_tile = tl.load(kv_tile_indices + item)
    size = tl.load(split_size)
    length = tl.load(lengths + request)
    first_state = tl.load(output_indptr + request)
    num_states = tl.load(output_indptr + request + 1) - first_state
    tables += tl.load(table_starts + request)
    wait_for_previous(PDL)
    if is_item:
        g, d = tl.arange(0, ROWS), tl.arange(0, D)
        is_head = g < GROUP
        first_head = kv_head * GROUP  # query head
        # exercise 06.1x5: an item's split of the keys, and its queries
        # hint: visible keys begin at length - window, or at 0; a split has size tokens, and the last ends at length
        # hint: load the heads first_head + g of the request's row of q, each with its elements d
        # hint: queries is [ROWS, D], and 0 from row GROUP on: is_head is the mask
        # hint: rows of q are q_row_stride elements apart, heads q_head_stride; see the loads below
        start = tl.maximum(length - window, 0) + kv_tile * size
        end = tl.minimum(start + size, length)
        heads = request.to(tl.int64) * q_row_stride + (first_head + g)[:, None] * q_head_stride
        queries = tl.load(q + heads + d[None, :], mask=is_head[:, None], other=0.0)  # [ROWS, D]
        # end exercise
        cache = (keys, values, k_scales, v_scales)
        maximum, total, weighted = attend(
            queries, cache, kv_head, start, end, token_rows, (tables, kv_head, BLOCK_SIZE, HKV, D), scale, softcap, TILE
        )
        HQ: tl.constexpr = HKV * GROUP
        row = request.to(tl.int64) * HQ + first_head  # of the output
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]  # without a visible key the result is zeros

        if num_states == 0:  # the sequence has a single split
            tl.store(out + (row + g)[:, None] * D + d[None, :], result, mask=is_head[:, None])
        else:
            state = (first_state + kv_tile).to(tl.int64) * HQ + first_head + g
            tl.store(partial + state[:, None] * D + d[None, :], result, mask=is_head[:, None])
            tl.store(partial_log + state, maximum + tl.log2(total), mask=is_head)
            if IS_ARRIVAL:  # noqa: SIM102 - decided when compiling
                if is_last_arrival(counters + request * HKV + kv_head, num_states):
                    m = tl.arange(0, MERGED_ROWS)
                    is_merged = m < GROUP
                    of_group, end_state = first_head + m, first_state + num_states
                    merged = merged_state(
                        partial, partial_log, first_state, end_state, of_group, is_merged, HQ, D, MERGED_ROWS, MERGED
                    )
                    tl.store(out + (row + m)[:, None] * D + d[None, :], merged, mask=is_merged[:, None])


def planned_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    table_starts: torch.Tensor,
    lengths: torch.Tensor,
    plan: DevicePlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    tiling: DecodeTiling,
    workspace: PlannedWorkspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.ops.attention.naive_attention` of one new token for each of B sequences over a paged KV cache.

    Args:
        q: ``[B, Hq, D]``; heads may be strided, the elements of a head are contiguous.
        keys, values, tables, table_starts, k_scales, v_scales, window, softcap, out: as
            :func:`shared.kernels.attention.paged_attention.paged_attention`.
        lengths: int32 ``[B]``, the tokens of each sequence, the new one included; must equal the planned lengths.
        plan: from :func:`shared.attention.plan.plan_decode`, with the same window.
        tiling: from :func:`shared.kernels.attention.planned_tiling.decode_tiling`; constant for a captured graph.

    Returns:
        ``[B, Hq, D]`` in the dtype of q. Raises ValueError for a plan or workspace of too few rows or states.
    """
    B, Hq, D = q.shape
    _, block_size, Hkv, _ = keys.shape
    if out is None:
        out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    if not launches(q):
        memory = (keys, values, tables, table_starts.tolist(), lengths.tolist())
        return attend_by_sequence(q, *memory, [1] * B, scale, window, softcap, out, k_scales, v_scales)
    if B == 0:
        return out
    workspace.check(plan)
    if plan.num_rows != B:
        raise ValueError(f"the plan has {plan.num_rows} sequences and the batch has {B}")
    if tiling.is_arrival and workspace.counters.shape[0] < B * Hkv:
        raise ValueError(f"the workspace serves {workspace.counters.shape[0] // Hkv} sequences, not {B}")
    group = Hq // Hkv
    rows = next_power_of_two(group)
    launch(
        planned_decode_kernel, (Hkv, plan.capacity),
        q, keys, values, tables, table_starts, lengths, k_scales, v_scales, plan.num_items, plan.split_size,
        plan.request_indices, plan.kv_tile_indices, plan.output_indptr, out, workspace.partial, workspace.partial_log,
        workspace.counters, *in_base_2(scale, softcap), NO_WINDOW if window is None else window, q.stride(0),
        q.stride(1),
        BLOCK_SIZE=block_size, HKV=Hkv, GROUP=group, D=D, ROWS=max(DOT_ROWS, rows), TILE=tiling.tile,
        IS_ARRIVAL=tiling.is_arrival, MERGED=max(1, tiling.merged_numbers // (rows * D)), MERGED_ROWS=rows,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if not tiling.is_arrival and plan.is_split:
        merge_states(workspace.partial, workspace.partial_log, plan.output_indptr, out)
    return out
