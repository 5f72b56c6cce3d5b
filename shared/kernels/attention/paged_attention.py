"""Decode attention over a paged KV cache: ``flash``. Introduced in phase 6.

This is the kernel of :mod:`shared.kernels.attention.decode_attention` with one more indirection: a token's key is found
through the sequence's block table (PagedAttention: Kwon et al., arXiv 2309.06180). A tile of keys need not be aligned
to blocks: each of its rows looks up its own block, so any block size works and a window may begin inside a block. A
row's D elements are contiguous, 16 bytes per thread; rows of adjacent heads are adjacent too, and are read by adjacent
programs. A lookup costs 4 bytes per 4 · D bytes of a key and a value in 16 bits, and hits the cache after the first
head.

Programs, splits, merging and invariants are those of the contiguous kernel; the loop is
:func:`shared.kernels.attention.online_softmax.attend`. Only the block table entries of visible tokens are read.
"""

import torch

from shared.kernels.attention.decode_attention import (
    NO_WINDOW,
    DecodeWorkspace,
    Tiling,
    in_base_2,
    keys_of_split,
    load_queries,
    split_options,
    store_split,
)
from shared.kernels.attention.online_softmax import attend
from shared.kernels.e4m3 import dequantized
from shared.kernels.launch import launch, launches, tl, triton
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
def token_rows(index, end, table, kv_head, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr):
    """Offsets of a head's rows in a layer's KV cache, int64, for the tokens at ``index``, masked by ``end``."""
    block = tl.load(table + index // BLOCK_SIZE, mask=index < end, other=0).to(tl.int64)
    return ((block * BLOCK_SIZE + index % BLOCK_SIZE) * HKV + kv_head) * D


@triton.jit
def paged_attention_kernel(
    q, keys, values, tables, table_starts, lengths, k_scales, v_scales, out, partial, partial_max, partial_sum,
    counters, scale, softcap, window, q_row_stride, q_head_stride,
    BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, MERGED: tl.constexpr, MERGED_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)  # one for each sequence and KV head
    sequence, kv_head = row // HKV, row % HKV
    length = tl.load(lengths + sequence)
    first, split_size, num_used = keys_of_split(length, window, TILE)
    g, d = tl.arange(0, ROWS), tl.arange(0, D)
    is_head = g < GROUP
    out += row.to(tl.int64) * (GROUP * D)  # the heads of a group are adjacent
    if tl.program_id(1) < num_used:
        queries = load_queries(q, sequence, kv_head, q_row_stride, q_head_stride, g, d, is_head, GROUP)
        tables += tl.load(table_starts + sequence)
        start = first + tl.program_id(1) * split_size
        end = tl.minimum(start + split_size, length)
        cache = (keys, values, k_scales, v_scales)
        maximum, total, weighted = attend(
            queries, cache, kv_head, start, end, token_rows, (tables, kv_head, BLOCK_SIZE, HKV, D), scale, softcap,
            TILE,
            KEYS_FIRST=True,
        )  # fmt: skip
        states = (partial, partial_max, partial_sum, counters)
        store_split(out, states, maximum, total, weighted, num_used, g, d, is_head, GROUP, D, MERGED_ROWS, MERGED)
    elif tl.program_id(1) == 0:  # no visible key
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
        q, window, softcap, workspace, out: as :func:`shared.kernels.attention.decode_attention.decode_attention`.
        keys, values: ``[blocks, block_size, Hkv, D]``, a layer's KV cache, contiguous.
        k_scales, v_scales: fp32 ``[Hkv]``, for keys and values in e4m3 (FP8, or uint8 where the GPU has no FP8); None:
            they are stored unscaled.
        tables: int32, the concatenated block tables: ``tables[table_starts[b] + i]`` is the block of sequence b's
            tokens from ``i · block_size`` on.
        table_starts: int32 ``[B]``.
        lengths: int32 ``[B]``, each sequence's tokens, the new one included. All three are read on the device, so a
            captured launch can be replayed with different values.

    Returns:
        ``[B, Hq, D]`` in the dtype of q.
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
    workspace.check(B)
    launch(
        paged_attention_kernel, (B * Hkv, workspace.num_splits),
        q, keys, values, tables, table_starts, lengths, k_scales, v_scales, out, *workspace.states,
        *in_base_2(scale, softcap), NO_WINDOW if window is None else window, q.stride(0), q.stride(1),
        BLOCK_SIZE=block_size, **split_options(TILINGS[D], Hq, Hkv, D, keys.element_size()),
    )  # fmt: skip
    return out


def attend_by_sequence(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    table_starts: list[int],
    lengths: list[int],
    num_new_tokens: list[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op, sequence by sequence, for devices without kernels; ``num_new_tokens`` rows of q belong to each."""
    row = 0
    for start, length, num_new in zip(table_starts, lengths, num_new_tokens, strict=True):
        new = slice(row, row + num_new)
        if length == 0:
            out[new] = 0.0
        elif num_new:
            first = 0 if window is None else max(0, length - num_new + 1 - window)  # first key of the first new token
            k, v = gathered(keys, values, tables, start, first, length, q.dtype, k_scales, v_scales)
            out[new] = sdpa_attention(q[new], k, v, scale=scale, window=window, softcap=softcap)
        row += num_new
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

    For devices without kernels; the arguments are those of :func:`paged_attention`. ``dtype`` is that of dequantized
    keys and values.
    """
    block_size = keys.shape[1]
    skipped = first // block_size
    blocks = tables[start + skipped : start - (-end // block_size)].long()
    tokens = slice(first - skipped * block_size, end - skipped * block_size)
    k, v = (memory.index_select(0, blocks).flatten(0, 1)[tokens] for memory in (keys, values))
    if k_scales is not None and v_scales is not None:
        k, v = dequantized(k, k_scales, dtype), dequantized(v, v_scales, dtype)
    return k.transpose(0, 1), v.transpose(0, 1)
