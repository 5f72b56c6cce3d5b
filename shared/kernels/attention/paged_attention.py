"""Decode attention over a paged KV cache: ``flash``. Introduced in phase 6.

The kernel of :mod:`shared.kernels.attention.decode_attention` with one more indirection: a token's key is found
through the sequence's block table (PagedAttention: Kwon et al., arXiv 2309.06180). A tile of keys need not be
aligned to blocks: each of its rows looks up its own block, so any block size works, and a window may begin inside a
block. A row's D elements are contiguous, 16 bytes per thread; rows of adjacent heads are adjacent too, and are read
by adjacent programs. A lookup costs 4 bytes for the 4 · D bytes of a key and a value in 16 bits, and hits the cache
after the first head.

Programs, splits and merge are those of the contiguous kernel: the grid depends on capacities, the loop on the length,
and the last program of a head to arrive merges.

Invariants: only the visible tokens of a sequence and their block table entries are read, so all others may be anything;
states are merged in the order of the keys; a sequence of length 0 gives zeros; the counters are zero between launches.
"""

import torch

from shared.kernels.arrival import is_last_arrival
from shared.kernels.attention.decode_attention import NO_WINDOW, PIPELINE_BYTES, DecodeWorkspace, Tiling, merge
from shared.kernels.attention.online_softmax import add_tile, in_base_2
from shared.kernels.e4m3 import dequantized, for_product, scale_of, widened
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton
from shared.ops.attention import sdpa_attention

TILINGS = {
    16: Tiling(tile=64, max_splits=64),
    32: Tiling(tile=64, max_splits=64),
    64: Tiling(tile=64, max_splits=64),
    128: Tiling(tile=64, max_splits=64),
    256: Tiling(tile=32, max_splits=64, merge_numbers=8192),
}
"""By head size; the workspace chooses the number of splits."""


@triton.jit
def token_rows(table, place, end, kv_head, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr):
    """Offsets of a head's rows in a layer's KV cache, int64, for the tokens at index ``place``, masked by ``end``."""
    block = tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0).to(tl.int64)
    return ((block * BLOCK_SIZE + place % BLOCK_SIZE) * HKV + kv_head) * D


@triton.jit
def paged_attention_kernel(
    q,
    keys,
    values,
    tables,
    table_starts,
    lengths,
    k_scales,
    v_scales,
    out,
    partial,
    partial_max,
    partial_sum,
    counters,
    scale,
    softcap,
    window,
    q_row_stride,
    q_head_stride,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
):
    row = tl.program_id(0)  # one for each sequence and KV head
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    sequence, kv_head = row // HKV, row % HKV
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0)  # of the visible keys
    num_tiles = tl.cdiv(length - first, TILE)
    split_size = tl.cdiv(num_tiles, num_splits) * TILE
    num_used = tl.cdiv(length - first, tl.maximum(split_size, 1))

    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    is_head = g < GROUP
    out += row.to(tl.int64) * (GROUP * D)  # the heads of a group are adjacent
    if split < num_used:
        heads = sequence.to(tl.int64) * q_row_stride + (kv_head * GROUP + g)[:, None] * q_head_stride
        queries = tl.load(q + heads + d[None, :], mask=is_head[:, None], other=0.0)  # [ROWS, D]
        tables += tl.load(table_starts + sequence)
        start = first + split * split_size
        end = tl.minimum(start + split_size, length)
        queries = for_product(queries, keys)
        scale *= scale_of(k_scales, kv_head, keys)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, D], tl.float32)
        # Block table entries are loaded a tile ahead, so that the loads of a tile do not wait for a lookup.
        rows = token_rows(tables, start + tl.arange(0, TILE), end, kv_head, BLOCK_SIZE, HKV, D)
        for tile in tl.range(start, end, TILE):
            place = tile + tl.arange(0, TILE)
            is_key = place < end
            tokens = rows[:, None] + d[None, :]
            rows = token_rows(tables, place + TILE, end, kv_head, BLOCK_SIZE, HKV, D)
            k = widened(tl.load(keys + tokens, mask=is_key[:, None], other=0.0), queries.dtype)  # [TILE, D]
            v = widened(tl.load(values + tokens, mask=is_key[:, None], other=0.0), queries.dtype)
            maximum, total, weighted = add_tile(
                queries, k, v, is_key[None, :], maximum, total, weighted, scale, softcap, HAS_SOFTCAP
            )
        weighted *= scale_of(v_scales, kv_head, values)

        if num_used == 1:
            tl.store(out + g[:, None] * D + d[None, :], weighted / total[:, None], mask=is_head[:, None])
        else:
            states = row.to(tl.int64) * num_splits
            state = (states + split) * GROUP + g
            tl.store(partial + state[:, None] * D + d[None, :], weighted, mask=is_head[:, None])
            tl.store(partial_max + state, maximum, mask=is_head)
            tl.store(partial_sum + state, total, mask=is_head)
            if is_last_arrival(counters + row, num_used):
                merge(partial, partial_max, partial_sum, out, states, num_used, GROUP, D, MERGED_ROWS, MERGED)
    elif split == 0:  # no visible key
        tl.store(out + g[:, None] * D + d[None, :], tl.zeros([ROWS, D], tl.float32), mask=is_head[:, None])


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    table_starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    workspace: DecodeWorkspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.ops.attention.naive_attention` of one new token for each of B sequences.

    Args:
        q: ``[B, Hq, D]``; heads may be strided, the elements of a head are contiguous.
        keys, values: ``[blocks, block_size, Hkv, D]``, a layer's KV cache, contiguous.
        k_scales, v_scales: fp32 ``[Hkv]``, for keys and values in e4m3 (FP8, or uint8 where the GPU has no FP8); None:
            they are stored as they are.
        tables: int32, the concatenated block tables: ``tables[table_starts[b] + i]`` is the block of sequence b's
            tokens from ``i · block_size`` on.
        table_starts: int32 ``[B]``.
        lengths: int32 ``[B]``, each sequence's tokens, the new one included. All three are read on the device, so a
            captured launch can be replayed with other values.
        window: attend only to the last ``window`` tokens, the token itself included.
        softcap: scores become ``c · tanh(scores / c)``.
        workspace: for at least B sequences.
        out: output buffer, ``[B, Hq, D]`` contiguous; None: allocated.

    Returns:
        ``[B, Hq, D]`` in the dtype of q.
    """
    B, Hq, D = q.shape
    _, block_size, Hkv, _ = keys.shape
    if out is None:
        out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    if not launches(q):
        for b, (start, length) in enumerate(zip(table_starts.tolist(), lengths.tolist(), strict=True)):
            first = 0 if window is None else max(0, length - window)
            k, v = gathered(keys, values, tables, start, first, length, q.dtype, k_scales, v_scales)
            out[b] = sdpa_attention(q[b : b + 1], k, v, scale=scale, softcap=softcap)[0] if length else 0.0
        return out
    if B == 0:
        return out
    if workspace.num_sequences < B:
        raise ValueError(f"the workspace serves {workspace.num_sequences} sequences, not {B}")
    tiling = TILINGS[D]
    group = Hq // Hkv
    rows = next_power_of_two(group)
    launch(
        paged_attention_kernel,
        (B * Hkv, workspace.num_splits),
        q,
        keys,
        values,
        tables,
        table_starts,
        lengths,
        k_scales,
        v_scales,
        out,
        workspace.partial,
        workspace.partial_max,
        workspace.partial_sum,
        workspace.counters,
        *in_base_2(scale, softcap),
        NO_WINDOW if window is None else window,
        q.stride(0),
        q.stride(1),
        HAS_SOFTCAP=softcap is not None,
        BLOCK_SIZE=block_size,
        HKV=Hkv,
        GROUP=group,
        D=D,
        ROWS=max(16, rows),
        TILE=tiling.tile,
        MERGED=max(1, tiling.merge_numbers // (rows * D)),
        MERGED_ROWS=rows,
        num_warps=tiling.num_warps,
        num_stages=min(tiling.num_stages, max(1, PIPELINE_BYTES // (2 * tiling.tile * D * keys.element_size()))),
    )
    return out


def gathered(
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    start: int,
    first: int,
    end: int,
    dtype: torch.dtype,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values ``[Hkv, end - first, D]`` of the tokens ``first`` to ``end`` of the table at ``start``.

    For devices without kernels; the arguments are those of :func:`paged_attention`. ``dtype``: of dequantized ones.
    """
    block_size = keys.shape[1]
    skipped = first // block_size
    blocks = tables[start + skipped : start - (-end // block_size)].long()
    tokens = slice(first - skipped * block_size, end - skipped * block_size)
    k, v = (memory.index_select(0, blocks).flatten(0, 1)[tokens] for memory in (keys, values))
    if k_scales is not None and v_scales is not None:
        k, v = dequantized(k, k_scales, dtype), dequantized(v, v_scales, dtype)
    return k.transpose(0, 1), v.transpose(0, 1)
