"""Attention over several ranges of keys: segments, anywhere in a sequence, and its own tokens. Introduced in phase 9.1.

A program computes one item of the plan (:mod:`shared.tracks.segments.range_plan`) for one KV head: up to ``ROWS`` rows,
which are (query, head of the group) pairs, over one split of the ranges that they share. Keys stay as they were
written: rotated for positions counted from the range's first token. So the queries are moved: instead of rotating every
key, the kernel rotates each query back by the range's offset in the query's sequence before it reads the range's keys
(:mod:`shared.tracks.segments.relocation`). A range that only one sequence reads has one angle, whose sines and cosines
are computed with the plan. Sequences that share a segment may have it at different offsets, so each of its rows has its
own angle.

A launch has as many programs as can run at once, and each takes items at that stride, so a captured launch serves plans
with any number of items.

Invariants: only keys that some query of the item sees are read; a query rotated by zero is unchanged; a rotated query
is rounded once, to its dtype, since it is rotated either by its slot's offset or by the piece's; angles are reduced in
fp64, so they are as exact for a distant segment as for a near one; a state without keys is empty (logarithm -inf); the
plan is uploaded before the step's first kernel.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shared.kernels.attention.decode_attention import NO_WINDOW, in_base_2
from shared.kernels.attention.merge_states import merge_states
from shared.kernels.attention.online_softmax import add_tile
from shared.kernels.attention.paged_attention import token_rows
from shared.kernels.attention.planned_tiling import DecodeTiling, fitted
from shared.kernels.launch import launch, launch_dependents, next_power_of_two, tl, triton, wait_for_previous
from shared.tracks.segments.range_plan import RangePlan


@dataclass(frozen=True)
class RangeTiling(DecodeTiling):
    """The tilings of attention over ranges: one for steps with shared segments, one for steps without."""

    rows: int = 16  # (query, head) pairs of a tile
    is_early: bool = True  # whether a program looks up its first keys before it waits for the previous kernel

    def tokens(self, group: int) -> int:
        """Queries of a tile, for ``group`` query heads that share a KV head."""
        return self.rows // group


ALONE, SHARED = RangeTiling(64, 2, 3, 4), RangeTiling(64, 4, 3, 2, rows=64, is_early=False)
TILINGS = {  # by head size: alone, shared
    16: (ALONE, SHARED),
    32: (ALONE, SHARED),
    64: (ALONE, SHARED),
    128: (RangeTiling(64, 4, 2, 2), RangeTiling(64, 4, 2, 2, rows=64, is_early=False)),
    256: (RangeTiling(32, 4, 2, 2), RangeTiling(32, 4, 2, 2, rows=32, is_early=False)),
}


def range_tiling(is_shared: bool, group: int, head_dim: int, itemsize: int) -> RangeTiling:
    """The tiling for ``group`` query heads that share a KV head, and keys of ``itemsize`` bytes per element."""
    tiling = fitted(TILINGS[head_dim][is_shared], head_dim, itemsize)
    return replace(tiling, rows=max(tiling.rows, next_power_of_two(group)))


@triton.jit
def angles(distance, frequency):
    """Radians for a move by ``distance`` positions, fp32; a ``frequency`` is turns of a circle per position, fp64."""
    turns = distance.to(tl.float64) * frequency
    return ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)


@triton.jit
def range_attention_kernel(
    q, keys, values, positions, sequence_tables, sequence_table_starts, segment_tables, frequencies, turn_rows,
    num_items, item_slots, item_counts, item_splits, item_pieces, piece_tables, piece_turns, piece_bases,
    piece_begins, piece_ends, slot_rows, slot_offsets, slot_states, out, partial, partial_log, scale, softcap, window,
    q_row_stride, q_head_stride,
    BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes every item j + n · programs for KV head i; the grid is (Hkv, programs).

    IS_EARLY: it looks up its first keys before it waits for the previous kernel, and loads queries afterwards. Slots
    then have no offsets. Large tiles are slower this way.
    """
    launch_dependents(PDL)
    kv_head = tl.program_id(0)
    count_of_items = tl.load(num_items)
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    head = kv_head * GROUP + r % GROUP
    swapped = (d + D // 2) % D  # RoPE rotates element i with element i + D/2
    sign = tl.where(d < D // 2, 1.0, -1.0)[None, :]
    frequency = tl.load(frequencies + d % (D // 2))  # fp64, turns of a circle per position
    if not IS_EARLY:
        wait_for_previous(PDL)
    for item in tl.range(tl.program_id(1), count_of_items, tl.num_programs(1)):
        slot = tl.load(item_slots + item) + r // GROUP
        is_row = r < tl.load(item_counts + item) * GROUP
        row = tl.load(slot_rows + slot, mask=is_row, other=0).to(tl.int64)
        offset = tl.load(slot_offsets + slot, mask=is_row, other=0)
        position = tl.load(positions + row, mask=is_row, other=0).to(tl.int32)
        at = q + row * q_row_stride + head * q_head_stride
        if not IS_EARLY:
            query = tl.load(at[:, None] + d[None, :], mask=is_row[:, None], other=0.0)  # [ROWS, D]
            other = tl.load(at[:, None] + swapped[None, :], mask=is_row[:, None], other=0.0).to(tl.float32) * sign
            if tl.max(offset) > 0:  # a shared segment that is not at the beginning of every sequence
                angle = angles(offset[:, None], frequency[None, :])
                query = (query.to(tl.float32) * tl.cos(angle) + other * tl.sin(angle)).to(query.dtype)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, D], tl.float32)
        for piece in tl.range(tl.load(item_pieces + item), tl.load(item_pieces + item + 1)):
            turn = tl.load(piece_turns + piece)
            at_turn = turn_rows + piece * D + d % (D // 2)
            if not IS_EARLY:
                queries = query
                if turn > 0:
                    cos, sin = tl.load(at_turn)[None, :], tl.load(at_turn + D // 2)[None, :]
                    queries = (query.to(tl.float32) * cos + other * sin).to(query.dtype)
            place = position - offset - tl.load(piece_bases + piece)  # of the row, on the range's scale
            end = tl.minimum(tl.load(piece_ends + piece), tl.max(tl.where(is_row, place, -1)) + 1)
            least = tl.min(tl.where(is_row, place, 2147483647)) - window + 1
            start = tl.maximum(tl.load(piece_begins + piece), least)
            table = tl.load(piece_tables + piece)
            if table < 0:
                tables = sequence_tables + tl.load(sequence_table_starts - 1 - table)
            else:
                tables = segment_tables + table
            rows = token_rows(start + tl.arange(0, TILE), end, tables, kv_head, BLOCK_SIZE, HKV, D)
            if IS_EARLY:  # everything up to here belongs to the step; a second wait returns immediately
                wait_for_previous(PDL)
                queries = tl.load(at[:, None] + d[None, :], mask=is_row[:, None], other=0.0)
                other = tl.load(at[:, None] + swapped[None, :], mask=is_row[:, None], other=0.0).to(tl.float32) * sign
                if turn > 0:
                    cos, sin = tl.load(at_turn)[None, :], tl.load(at_turn + D // 2)[None, :]
                    queries = (queries.to(tl.float32) * cos + other * sin).to(queries.dtype)
            for tile in tl.range(start, end, TILE):
                number = tile + tl.arange(0, TILE)
                is_key = number < end
                tokens = rows[:, None] + d[None, :]  # [TILE, D]
                rows = token_rows(number + TILE, end, tables, kv_head, BLOCK_SIZE, HKV, D)
                k = tl.load(keys + tokens, mask=is_key[:, None], other=0.0)
                v = tl.load(values + tokens, mask=is_key[:, None], other=0.0)
                is_visible = (number[None, :] <= place[:, None]) & (number[None, :] > place[:, None] - window)
                maximum, total, weighted = add_tile(
                    queries, k, v, is_visible & is_key[None, :], maximum, total, weighted, scale, softcap
                )
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        first_state = tl.load(slot_states + slot, mask=is_row, other=0)
        is_whole = is_row & (first_state < 0)
        at_out = row * (HKV * GROUP) + head
        tl.store(out + at_out[:, None] * D + d[None, :], result, mask=is_whole[:, None])
        is_part = is_row & (first_state >= 0)
        state = (first_state + tl.load(item_splits + item)).to(tl.int64) * (HKV * GROUP) + head
        tl.store(partial + state[:, None] * D + d[None, :], result, mask=is_part[:, None])
        tl.store(partial_log + state, maximum + tl.log2(total), mask=is_part)
    if IS_EARLY:
        wait_for_previous(PDL)  # including programs without items


def turn_rows(turns: Tensor, frequencies: Tensor) -> Tensor:
    """The cosines and sines of a plan's ``piece_turns``, fp32 ``[pieces, 2, D/2]``; computed once for all steps of the
    plan."""
    angles = (turns.double()[:, None] * frequencies).frac_() * (2 * math.pi)
    return torch.stack((angles.cos(), angles.sin()), 1).float()


@dataclass(frozen=True)
class RangeWorkspace:
    """The states of a step's items; all layers share this memory."""

    partial: Tensor  # fp32 [states, Hq, D]
    partial_log: Tensor  # fp32 [states, Hq], base 2

    @classmethod
    def of(cls, num_states: int, num_heads: int, head_dim: int, device: torch.device) -> "RangeWorkspace":
        """A workspace for plans of up to this many states."""
        options: dict[str, Any] = {"dtype": torch.float32, "device": device}
        shape = num_states, num_heads
        return cls(torch.empty(*shape, head_dim, **options), torch.empty(*shape, **options))


def range_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    sequence_tables: Tensor,
    sequence_table_starts: Tensor,
    segment_tables: Tensor,
    frequencies: Tensor,
    rows_of_turns: Tensor,
    plan: RangePlan[Tensor],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tiling: RangeTiling,
    workspace: RangeWorkspace,
    out: Tensor,
) -> Tensor:
    """Attention of T new tokens over their sequences' ranges. Kernels only; on a CPU see ``SegmentView``.

    Args:
        q: ``[T, Hq, D]``, rotated for their positions; rows and heads may be strided.
        keys, values: a layer's ``[blocks, block_size, Hkv, D]``, rotated for positions within their ranges, or, for a
            sequence's own tokens, for positions in the sequence.
        positions: int64 ``[T]``, the tokens' positions in their sequences.
        sequence_tables, sequence_table_starts: int32, the block tables of the sequences' own tokens and their offsets.
        segment_tables: int32, the tables of ``Ranges.tables``.
        frequencies: fp64 ``[D/2]``, those of the layer's RoPE: angle per position, divided by 2π.
        rows_of_turns: the plan's :func:`turn_rows`.
        plan: from :func:`shared.tracks.segments.range_plan.plan_ranges`, on the device.
        window: attend only to the last ``window`` positions, the token's own included.
        softcap: scores become ``c · tanh(scores / c)``.
        tiling: from :func:`range_tiling`.
        out: ``[T, Hq, D]``, contiguous; rows that the plan has no slots for are left unchanged.

    Returns:
        ``out``. Raises ValueError for a plan with a different number of rows.
    """
    T, Hq, D = q.shape
    _, block_size, Hkv, _ = keys.shape
    if len(plan.output_indptr) != T + 1:
        raise ValueError(f"the plan has {len(plan.output_indptr) - 1} rows and the step has {T}")
    launch(
        range_attention_kernel, (Hkv, tiling.grid(Hkv, q.device).resident),
        q, keys, values, positions, sequence_tables, sequence_table_starts, segment_tables, frequencies, rows_of_turns,
        *list(plan.arrays().values())[:-1], out, workspace.partial, workspace.partial_log, *in_base_2(scale, softcap),
        NO_WINDOW if window is None else window, q.stride(0), q.stride(1),
        BLOCK_SIZE=block_size, HKV=Hkv, GROUP=Hq // Hkv, D=D, ROWS=tiling.rows,
        TILE=tiling.tile, IS_EARLY=tiling.is_early, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return merge_states(workspace.partial, workspace.partial_log, plan.output_indptr, out)
