"""Decode attention over a compressed KV cache, in which each head has its own tokens. Introduced in phase 9.2.

This is the kernel of :mod:`shared.kernels.attention.paged_attention` with different addresses and lengths. Each program
handles one sequence and one KV head. A head's tokens are, first, those that the last compression kept. They are stored
contiguously with those of the other layers and heads in the sequence's first blocks
(:mod:`shared.tracks.compression.layout`). The tail follows, one token per slot. With masks, all tokens keep their slots
and a mask marks the kept ones; a tile without kept tokens is not read.

The device keeps the list of kept tokens per row of the pool, so a captured launch serves every step.

Invariants: those of :mod:`shared.kernels.attention.paged_attention`; a sequence that was never compressed has an
empty packed part.
"""

from dataclasses import dataclass

from torch import Tensor

from shared.kernels.attention.decode_attention import (
    NO_WINDOW,
    DecodeWorkspace,
    in_base_2,
    keys_of_split,
    load_queries,
    split_options,
    store_split,
)
from shared.kernels.attention.online_softmax import attend
from shared.kernels.attention.paged_attention import TILINGS
from shared.kernels.launch import launch, tl, triton


@dataclass(frozen=True)
class KeptTokens:
    """What the heads of each row of the pool keep, on the device.

    ``ends``: int32 ``[rows, layers · Hkv + 2]``. Entries i and i + 1 delimit the packed tokens of head i, counted from
    the row's first token; heads are numbered from layer 0's. The last entry is the number of slots of the packed part,
    or with ``masks`` the number of tokens that the masks cover. ``masks``: uint8 ``[rows, layers, Hkv, bytes]``,
    little-endian.
    """

    ends: Tensor
    masks: Tensor | None = None


@triton.jit
def cell_rows(
    index, end, table, count, first_number, packed_slots, layer, kv_head, num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Offsets in the whole KV cache, int64, of a head's tokens ``index``, masked by ``end``; ``count`` are packed."""
    CELLS: tl.constexpr = BLOCK_SIZE * HKV
    number, slot = (first_number + index).to(tl.uint32), (packed_slots + index - count).to(tl.uint32)
    is_packed = index < count
    plane = number // CELLS
    entry = tl.where(is_packed, plane // LAYERS, slot // BLOCK_SIZE)
    of_layer = tl.where(is_packed, plane % LAYERS, layer)
    cell = tl.where(is_packed, number % CELLS, slot % BLOCK_SIZE * HKV + kv_head)
    block = tl.load(table + entry, mask=index < end, other=0)
    return (of_layer * num_blocks + block).to(tl.int64) * (CELLS * D) + cell * D


@triton.jit
def condensed_attention_kernel(
    q, keys, values, tables, table_starts, lengths, rows, ends, masks, out, partial, partial_max, partial_sum, counters,
    scale, softcap, window, layer, num_blocks, mask_bytes, q_row_stride, q_head_stride,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr, MERGED_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # one for each sequence and KV head
    sequence, kv_head = row // HKV, row % HKV
    of_pool = tl.load(rows + sequence).to(tl.int64)
    ends += of_pool * (LAYERS * HKV + 2)
    head = layer * HKV + kv_head
    first_number, covered = tl.load(ends + head), tl.load(ends + LAYERS * HKV + 1)
    if masks is None:
        count, packed_slots = tl.load(ends + head + 1) - first_number, covered
    else:
        count, packed_slots = first_number * 0, covered * 0
        masks += (of_pool * (LAYERS * HKV) + head) * mask_bytes
    length = count + tl.load(lengths + sequence) - packed_slots
    first, split_size, num_used = keys_of_split(length, window, TILE)
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    is_head = g < GROUP
    out += row.to(tl.int64) * (GROUP * D)  # the heads of a group are adjacent
    if tl.program_id(1) < num_used:
        queries = load_queries(q, sequence, kv_head, q_row_stride, q_head_stride, g, d, is_head, GROUP)
        table = tables + tl.load(table_starts + sequence)
        start = first + tl.program_id(1) * split_size
        end = tl.minimum(start + split_size, length)
        kept = None if masks is None else (masks, covered)
        cache = (keys, values, None, None)
        maximum, total, weighted = attend(
            queries, cache, kv_head, start, end, cell_rows,
            (table, count, first_number, packed_slots, layer, kv_head, num_blocks, LAYERS, BLOCK_SIZE, HKV, D),
            scale, softcap, TILE, kept=kept,
        )  # fmt: skip
        maximum = tl.maximum(maximum, -1e30)  # a split without kept tokens has no weight in any merge
        states = (partial, partial_max, partial_sum, counters)
        store_split(out, states, maximum, total, weighted, num_used, g, d, is_head, GROUP, D, MERGED_ROWS, MERGED)
    elif tl.program_id(1) == 0:  # no visible key
        tl.store(out + g[:, None] * D + d[None, :], tl.zeros([ROWS, D], tl.float32), mask=is_head[:, None])


def condensed_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    table_starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    kept: KeptTokens,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> Tensor:
    """:func:`shared.tracks.compression.kept_cells.masked_attention` of one new token for each of B sequences, on a GPU.

    Args:
        q, tables, table_starts, scale, softcap, workspace: as in
            :func:`shared.kernels.attention.paged_attention.paged_attention`.
        keys, values: ``[layers, blocks, block_size, Hkv, D]``, the KV cache of all layers, contiguous.
        lengths: int32 ``[B]``, the slots of each sequence, the new token's included.
        rows: int32 ``[B]``, the row of each sequence in ``kept``.
        window: attend only to the last ``window`` tokens that the head has, or that its mask covers.
        out: output buffer, ``[B, Hq, D]`` contiguous.

    Returns:
        ``out``.
    """
    B, Hq, D = q.shape
    num_layers, num_blocks, block_size, Hkv, _ = keys.shape
    workspace.check(B)
    launch(
        condensed_attention_kernel, (B * Hkv, workspace.num_splits),
        q, keys, values, tables, table_starts, lengths, rows, kept.ends, kept.masks, out, *workspace.states,
        *in_base_2(scale, softcap), NO_WINDOW if window is None else window, layer, num_blocks,
        0 if kept.masks is None else kept.masks.shape[-1], q.stride(0), q.stride(1),
        LAYERS=num_layers, BLOCK_SIZE=block_size, **split_options(TILINGS[D], Hq, Hkv, D, keys.element_size()),
    )  # fmt: skip
    return out
