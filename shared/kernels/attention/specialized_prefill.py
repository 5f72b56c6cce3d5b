"""Prefill attention with warp specialization: the items of a plan whose keys are copied, on Hopper. Introduced in
phase 6.1.

In :mod:`shared.kernels.attention.planned_prefill` all warps of a program do the same at the same time, so the tensor
cores wait while exponentials are computed. Here three groups of warps have one task each: *warp specialization*
(FlashAttention-3, arXiv 2407.08608). One loads tiles of queries, keys and values, several ahead. Two attend, each for
half of a tile's rows: while a group computes the weights of a tile, the tensor cores multiply the weights of the tile
before with its values, or work for the other group. A program computes one item after the other, so the next item's
loads begin while the current one ends.

It is written in Gluon (:mod:`shared.kernels.gluon`), which neither the interpreter nor every version of Triton runs, so
Triton's kernel stays for everything else.

A buffer has two barriers. A load that has arrived completes a phase of ``full``; both groups that have read the buffer
complete a phase of ``empty``. The n-th use of a buffer waits for the n-th phase, of which a barrier keeps the parity.

Invariants: those of the planned kernel, for items that have keys; all groups walk the same items and tiles, so their
counts of phases agree.
"""

from typing import Any, NamedTuple

import torch

from shared.attention.descriptor import DevicePlan
from shared.kernels.attention.planned_tiling import CopiedTiling
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.attention.prompt_keys import PromptKeys
from shared.kernels.gluon import (
    COMPUTING,
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
    warpgroup_mma_wait,
)
from shared.kernels.launch import launch, launch_dependents, num_multiprocessors, wait_for_previous

ROWS = gl.constexpr(64)
"""Rows of queries per group: the fewest that four warps multiply together on Hopper."""


class Shape(NamedTuple):
    """The constants of a kernel."""

    HKV: int
    GROUP: int  # query heads of a KV head
    TOKENS: int  # of a tile of queries, which has 2 · ROWS rows
    D: int
    KEYS: int  # of a tile of keys
    STAGES: int  # buffers for keys, and as many for values
    TAKES_TURNS: bool  # whether the groups that attend take turns with the tensor cores


class Plan(NamedTuple):
    """What locates the items; see :class:`shared.attention.descriptor.DevicePlan`."""

    first_rows: Any
    lengths: Any
    num_items: Any
    split_size: Any
    requests: Any
    query_tiles: Any
    kv_tiles: Any
    query_indptr: Any
    window: Any  # the tokens that a token attends to at most, itself included


class Item(NamedTuple):
    """A tile of queries of a KV head, and a split of the keys that it attends to."""

    kv_head: Any
    query_row: Any  # of its first token
    num_tokens: Any
    position: Any  # of its first token, in the cache
    key_row: Any  # of the request's first key
    start: Any
    end: Any
    split: Any
    num_tiles: Any  # of keys; 0: there is nothing to do


class Buffers(NamedTuple):
    """Shared memory; the tiles of keys and values have STAGES buffers each, and so have their barriers."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    turns: Any  # a barrier for each group that attends


class Outputs(NamedTuple):
    """Where results and the states of splits are stored."""

    indptr: Any
    out: Any
    partial: Any
    partial_log: Any


@gluon.jit
def find_item(n, plan, SHAPE: gl.constexpr):
    """This program's n-th item. Where items queue, those with the most keys come first, so a program that takes the
    first item of a round takes the last one of the next round."""
    offset = gl.program_id(0)
    if n % 2 == 1:
        offset = gl.num_programs(0) - 1 - offset
    number = n * gl.num_programs(0) + offset
    item = number // SHAPE.HKV
    is_item = item < gl.load(plan.num_items)
    item = gl.where(is_item, item, 0)
    request = gl.load(plan.requests + item)
    key_row = gl.load(plan.first_rows + request)
    query_row = gl.load(plan.query_indptr + request)
    num_new = gl.load(plan.query_indptr + request + 1) - query_row
    first_token = gl.load(plan.query_tiles + item) * SHAPE.TOKENS
    num_tokens = gl.minimum(SHAPE.TOKENS, num_new - first_token)
    position = gl.load(plan.lengths + request) - num_new + first_token
    split = gl.load(plan.kv_tiles + item)
    size = gl.load(plan.split_size)
    start = gl.maximum(position + 1 - plan.window, 0) + split * size
    end = gl.minimum(start + size, position + num_tokens)
    num_tiles = (gl.maximum(end - start, 0) + SHAPE.KEYS - 1) // SHAPE.KEYS
    num_tiles = gl.where(is_item & (key_row >= 0), num_tiles, 0)
    query_row += first_token
    return Item(number % SHAPE.HKV, query_row, num_tokens, position, key_row, start, end, split, num_tiles)


@gluon.jit
def load_tiles(q_tiles, kv_tiles, num_copied, plan, rounds, buffers, SHAPE: gl.constexpr):
    """The task of the warp that loads."""
    BYTES: gl.constexpr = SHAPE.D * buffers.q.dtype.primitive_bitwidth // 8
    num_items, num_loaded = 0, 0
    for n in range(rounds):
        item = find_item(n, plan, SHAPE)
        if item.num_tiles > 0:
            mbarrier.wait(buffers.q_empty, (num_items & 1) ^ 1)
            mbarrier.expect(buffers.q_full, SHAPE.TOKENS * SHAPE.GROUP * BYTES)
            first = [item.query_row, item.kv_head * SHAPE.GROUP, 0]
            tma.async_copy_global_to_shared(q_tiles, first, buffers.q_full, buffers.q)
            num_items += 1
            for tile in range(item.num_tiles):
                stage = num_loaded % SHAPE.STAGES
                parity = num_loaded // SHAPE.STAGES & 1
                row, column = item.key_row + item.start + tile * SHAPE.KEYS, item.kv_head * SHAPE.D
                k_full, v_full = buffers.k_full.index(stage), buffers.v_full.index(stage)
                mbarrier.wait(buffers.k_empty.index(stage), parity ^ 1)
                mbarrier.expect(k_full, SHAPE.KEYS * BYTES)
                tma.async_copy_global_to_shared(kv_tiles, [row, column], k_full, buffers.k.index(stage))
                mbarrier.wait(buffers.v_empty.index(stage), parity ^ 1)
                mbarrier.expect(v_full, SHAPE.KEYS * BYTES)
                tma.async_copy_global_to_shared(kv_tiles, [num_copied + row, column], v_full, buffers.v.index(stage))
                num_loaded += 1


@gluon.jit
def weigh(scores, maximum, total, scale, seen, tile, end, KEYS: gl.constexpr, SCORES: gl.constexpr):
    """:func:`shared.kernels.attention.online_softmax.weigh` of scores ``[ROWS, KEYS]`` of the keys from ``tile`` on.

    ``seen``: the first and the last key of each row, the greatest of the first, and the least of the last.
    """
    first, last, greatest_first, least_last = seen
    if (tile < greatest_first) | (tile + KEYS > gl.minimum(least_last + 1, end)):
        key = tile + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))[None, :]
        is_visible = (key >= first[:, None]) & (key <= last[:, None]) & (key < end)
        scores = gl.where(is_visible, scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # -inf - -inf is NaN
    weights = gl.exp2(scores * scale - base[:, None])
    kept = gl.exp2(maximum - base)
    return weights, kept, new_maximum, total * kept + gl.sum(weights, 1)


@gluon.jit
def attend(HALF: gl.constexpr, plan, rounds, buffers, outputs, scale, SHAPE: gl.constexpr):
    """The task of a group that attends, for the first or the second half of the rows of each tile of queries."""
    HEADS: gl.constexpr = SHAPE.HKV * SHAPE.GROUP
    GROUP: gl.constexpr = SHAPE.GROUP
    D: gl.constexpr = SHAPE.D
    KEYS: gl.constexpr = SHAPE.KEYS
    STAGES: gl.constexpr = SHAPE.STAGES
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, k_width=2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // min(D // 8, 32), min(D // 8, 32)], [4, 1], [1, 0])
    dtype: gl.constexpr = buffers.q.dtype
    k, v = buffers.k, buffers.v
    queries = buffers.q.reshape([2 * ROWS, D]).slice(HALF * ROWS, ROWS)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    num_items, num_read, num_turns = 0, 0, 0
    for n in range(rounds):
        item = find_item(n, plan, SHAPE)
        if item.num_tiles > 0:
            start, end = item.start, item.end
            first_state = gl.load(outputs.indptr + item.query_row)  # all tokens of a tile have as many splits
            num_splits = gl.load(outputs.indptr + item.query_row + 1) - first_state  # 0: the tile has one
            r = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            last = item.position + r // GROUP
            least_last = item.position + HALF * ROWS // GROUP
            greatest_first = item.position + (HALF * ROWS + ROWS - 1) // GROUP - plan.window + 1
            seen = (last - plan.window + 1, last, greatest_first, least_last)
            maximum = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, SCORES))
            weighted = gl.zeros([ROWS, D], gl.float32, layout=VALUES)

            mbarrier.wait(buffers.q_full, num_items & 1)
            num_items += 1
            stage = num_read % STAGES
            mbarrier.wait(buffers.k_full.index(stage), num_read // STAGES & 1)
            scores = warpgroup_mma(queries, k.index(stage).permute((1, 0)), nothing, use_acc=False)
            mbarrier.arrive(buffers.k_empty.index(stage), count=1)
            weights, kept, maximum, total = weigh(scores, maximum, total, scale, seen, start, end, KEYS, SCORES)
            operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
            for tile in range(1, item.num_tiles):
                before = num_read % STAGES
                parity_before = num_read // STAGES & 1
                num_read += 1
                stage = num_read % STAGES
                mbarrier.wait(buffers.k_full.index(stage), num_read // STAGES & 1)
                if SHAPE.TAKES_TURNS:
                    mbarrier.wait(buffers.turns.index(HALF), (num_turns & 1) ^ (1 - HALF))
                    num_turns += 1
                scores = warpgroup_mma(queries, k.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(buffers.v_full.index(before), parity_before)
                sums = warpgroup_mma(operand, v.index(before), weighted, is_async=True)
                if SHAPE.TAKES_TURNS:
                    mbarrier.arrive(buffers.turns.index(1 - HALF), count=1)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
                mbarrier.arrive(buffers.k_empty.index(stage), count=1)
                weights, kept, maximum, total = weigh(
                    scores, maximum, total, scale, seen, start + tile * KEYS, end, KEYS, SCORES
                )
                weighted = warpgroup_mma_wait(num_outstanding=0, deps=[sums])
                mbarrier.arrive(buffers.v_empty.index(before), count=1)
                weighted = weighted * gl.convert_layout(kept, gl.SliceLayout(1, VALUES))[:, None]
                operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
            mbarrier.arrive(buffers.q_empty, count=1)
            stage = num_read % STAGES
            mbarrier.wait(buffers.v_full.index(stage), num_read // STAGES & 1)
            weighted = warpgroup_mma(operand, v.index(stage), weighted)
            mbarrier.arrive(buffers.v_empty.index(stage), count=1)
            num_read += 1

            divisor = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, VALUES))
            result = weighted / divisor[:, None]
            r = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, STORED))[None, :]
            is_row = r // GROUP < item.num_tokens
            head = item.kv_head * GROUP + r % GROUP
            if num_splits == 0:
                row = (item.query_row + r // GROUP).to(gl.int64) * HEADS + head
                gl.store(
                    outputs.out + row[:, None] * D + d, gl.convert_layout(result.to(dtype), STORED), is_row[:, None]
                )
            else:
                logarithm = gl.convert_layout(maximum + gl.log2(total), gl.SliceLayout(1, STORED))
                state = (first_state + r // GROUP * num_splits + item.split).to(gl.int64) * HEADS + head
                into = outputs.partial + state[:, None] * D + d
                gl.store(into, gl.convert_layout(result, STORED), mask=is_row[:, None])
                gl.store(outputs.partial_log + state, logarithm, mask=is_row)


@gluon.jit
def specialized_prefill_kernel(
    out, q_tiles, copied_tiles, num_copied, first_rows, lengths, num_items, split_size, requests, query_tiles, kv_tiles,
    query_indptr, output_indptr, partial, partial_log, scale, window, SHAPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The grid has a program for each multiprocessor, or for each item and KV head if those are fewer."""
    launch_dependents(PDL)
    STAGES: gl.constexpr = SHAPE.STAGES
    dtype: gl.constexpr = copied_tiles.dtype
    k = gl.allocate_shared_memory(dtype, [STAGES, SHAPE.KEYS, SHAPE.D], copied_tiles.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, SHAPE.KEYS, SHAPE.D], copied_tiles.layout)
    q = gl.allocate_shared_memory(dtype, [SHAPE.TOKENS, SHAPE.GROUP, SHAPE.D], q_tiles.layout)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    buffers = Buffers(q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, barriers(2, 1))
    fence_async_shared()
    wait_for_previous(PDL)
    plan = Plan(first_rows, lengths, num_items, split_size, requests, query_tiles, kv_tiles, query_indptr, window)
    rounds = (gl.load(num_items) * SHAPE.HKV + gl.num_programs(0) - 1) // gl.num_programs(0)
    outputs = Outputs(output_indptr, out, partial, partial_log)
    gl.warp_specialize(
        [
            (attend, (gl.constexpr(0), plan, rounds, buffers, outputs, scale, SHAPE)),
            (attend, (gl.constexpr(1), plan, rounds, buffers, outputs, scale, SHAPE)),
            (load_tiles, (q_tiles, copied_tiles, num_copied, plan, rounds, buffers, SHAPE)),
        ],
        [4, 1],
        [COMPUTING, LOADING],
    )


def specialized_prefill(
    q: torch.Tensor,
    copied: PromptKeys,
    lengths: torch.Tensor,
    plan: DevicePlan,
    *,
    scale: float,
    window: int,
    tiling: CopiedTiling,
    workspace: PlannedWorkspace,
    out: torch.Tensor,
) -> None:
    """The items of :func:`shared.kernels.attention.planned_prefill.planned_prefill` whose keys are copied.

    Args:
        q, lengths, plan, workspace, out: as there; q in the dtype of the keys, with a power of two of heads for each KV
            head.
        copied: the keys and values of the plan's sequences, copied for tiles of ``tiling.tile`` tokens.
        scale: in base 2, as :func:`shared.kernels.attention.decode_attention.in_base_2` gives it.
        window: the number of tokens that a new token attends to.
    """
    _, Hq, D = q.shape
    Hkv = copied.matrix.shape[1] // D
    shape = Shape(Hkv, Hq // Hkv, plan.tokens_per_tile, D, tiling.tile, tiling.num_stages, tiling.takes_turns)
    q_tiles = descriptor(q, [shape.TOKENS, shape.GROUP, D])
    launch(
        specialized_prefill_kernel, (min(num_multiprocessors(q.device), Hkv * plan.capacity),),
        out, q_tiles, copied.tiles(tiling.tile, D, descriptor), copied.num_rows, copied.first_rows, lengths,
        plan.num_items, plan.split_size, plan.request_indices, plan.query_tile_indices, plan.kv_tile_indices,
        plan.query_indptr, plan.output_indptr, workspace.partial, workspace.partial_log, scale, window,
        SHAPE=shape, num_warps=tiling.num_warps, maxnreg=REGISTERS,
    )  # fmt: skip
