"""Prefill attention over a paged KV cache: ``flash``. Introduced in phase 6.

The tiled attention of FlashAttention (Dao et al., arXiv 2205.14135) over block tables, for a ragged batch: each
sequence has any number of new tokens and may have cached tokens before them; the keys of both are read from the cache.
The same kernel serves a prompt, a chunk of a prompt, a prompt after a shared prefix, and draft tokens to verify.

As in decoding, the query heads of a KV head share its tiles: a tile's rows are packed (new token, head of the group)
pairs (FlashInfer, arXiv 2501.01005). Token i of n new ones has cache index ``length - n + i`` and attends to no later
one. A program finds its sequence itself: with R rows per tile, sequence b's tiles begin at ``query_starts[b] · G // R +
b``, which gives each sequence at least the tiles it needs; surplus programs return at once.

Invariants: only visible tokens and their block table entries are read; the loop covers the keys that the tile's rows
attend to, whatever the lengths of other sequences; a result depends on the rest of the batch only through the tile
size.
"""

from dataclasses import dataclass

import torch

from shared.kernels.attention.decode_attention import NO_WINDOW
from shared.kernels.attention.online_softmax import add_tile, in_base_2
from shared.kernels.attention.paged_attention import gathered, token_rows
from shared.kernels.e4m3 import for_product, scale_of, widened
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton
from shared.ops.attention import sdpa_attention


@dataclass(frozen=True)
class PrefillTiling:
    """The tiling: packed rows and keys per tile, warps and pipeline stages."""

    rows: int
    tile: int
    num_warps: int = 4
    num_stages: int = 2


LEAST_SEQUENCES = 64
"""Sequence offsets that a program searches at once: one compiled kernel serves every smaller batch."""


@triton.jit(do_not_specialize=["num_sequences"])
def paged_prefill_kernel(
    q,
    keys,
    values,
    tables,
    table_starts,
    lengths,
    k_scales,
    v_scales,
    query_starts,
    out,
    num_sequences,
    scale,
    softcap,
    window,
    q_token_stride,
    q_head_stride,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    program, kv_head = tl.program_id(0), tl.program_id(1)
    b = tl.arange(0, SEQUENCES)
    first_tiles = tl.load(query_starts + b, mask=b < num_sequences, other=0) * GROUP // ROWS + b
    is_begun = (first_tiles <= program) & (b < num_sequences)
    sequence = tl.sum(is_begun.to(tl.int32), 0) - 1
    first_row = (program - tl.max(tl.where(is_begun, first_tiles, 0), 0)) * ROWS
    query_start = tl.load(query_starts + sequence)
    num_rows = (tl.load(query_starts + sequence + 1) - query_start) * GROUP
    if first_row < num_rows:
        length = tl.load(lengths + sequence)
        past = length - num_rows // GROUP
        tables += tl.load(table_starts + sequence)
        row, d = first_row + tl.arange(0, ROWS), tl.arange(0, D)
        is_row = row < num_rows
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        token_of_step = (query_start + token).to(tl.int64)
        heads = token_of_step * q_token_stride + head * q_head_stride
        queries = tl.load(q + heads[:, None] + d[None, :], mask=is_row[:, None], other=0.0)  # [ROWS, D]

        last_seen = past + token  # by each row
        first_seen = last_seen - window + 1
        start = tl.maximum(past + first_row // GROUP - window + 1, 0)
        end = tl.minimum(past + (first_row + ROWS - 1) // GROUP + 1, length)
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
            is_visible = (place[None, :] <= last_seen[:, None]) & (place[None, :] >= first_seen[:, None])
            maximum, total, weighted = add_tile(
                queries, k, v, is_visible, maximum, total, weighted, scale, softcap, HAS_SOFTCAP
            )
        weighted *= scale_of(v_scales, kv_head, values)
        outputs = (token_of_step * (HKV * GROUP) + head) * D
        tl.store(out + outputs[:, None] + d[None, :], weighted / total[:, None], mask=is_row[:, None])


def prefill_tiling(num_rows: int, num_sequences: int, head_dim: int, itemsize: int) -> PrefillTiling:
    """The tiling for ``num_rows`` packed rows in total: the tile fits the average sequence, as in FlashInfer.

    fp32 does not use tensor cores, and a tile of its products is held in registers.
    """
    if itemsize == 4:
        return PrefillTiling(16 if head_dim == 256 else 32, 32, num_stages=1)
    average = num_rows / num_sequences
    if average <= 16:
        return PrefillTiling(16, 32 if head_dim == 256 else 64, num_stages=3)
    if average <= 64 or head_dim == 256:
        return PrefillTiling(64, 32 if head_dim == 256 else 64)
    return PrefillTiling(128, 64, num_warps=8 if head_dim == 128 else 4)


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    table_starts: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.ops.attention.naive_attention` of each of B sequences' new tokens, laid end to end.

    Args:
        q: ``[T, Hq, D]``; heads may be strided, the elements of a head are contiguous.
        keys, values, tables, table_starts, k_scales, v_scales: as in
            :func:`shared.kernels.attention.paged_attention.paged_attention`.
        lengths: int32 ``[B]``, each sequence's tokens, the new ones included.
        query_starts: int32 ``[B + 1]``, cumulative sum of the sequences' new tokens, which may be 0, starting at 0. The
            last entry may be less than T: further rows are padding and are not written.
        window: attend only to the last ``window`` tokens, the token itself included.
        softcap: scores become ``c · tanh(scores / c)``.
        out: output buffer, ``[T, Hq, D]`` contiguous; None: allocated.

    Returns:
        ``[T, Hq, D]`` in the dtype of q.
    """
    T, Hq, D = q.shape
    _, block_size, Hkv, _ = keys.shape
    B = len(lengths)
    if out is None:
        out = torch.empty(T, Hq, D, dtype=q.dtype, device=q.device)
    if not launches(q):
        rows = query_starts.tolist()
        about = zip(rows, rows[1:], table_starts.tolist(), lengths.tolist(), strict=False)
        for row, next_row, start, length in about:
            if next_row > row:
                first = 0 if window is None else max(0, length - (next_row - row) + 1 - window)
                k, v = gathered(keys, values, tables, start, first, length, q.dtype, k_scales, v_scales)
                out[row:next_row] = sdpa_attention(q[row:next_row], k, v, scale=scale, window=window, softcap=softcap)
        return out
    if T == 0:
        return out
    group = Hq // Hkv
    tiling = prefill_tiling(T * group, B, D, q.element_size())
    launch(
        paged_prefill_kernel,
        (T * group // tiling.rows + B, Hkv),
        q,
        keys,
        values,
        tables,
        table_starts,
        lengths,
        k_scales,
        v_scales,
        query_starts,
        out,
        B,
        *in_base_2(scale, softcap),
        NO_WINDOW if window is None else window,
        q.stride(0),
        q.stride(1),
        HAS_SOFTCAP=softcap is not None,
        BLOCK_SIZE=block_size,
        HKV=Hkv,
        GROUP=group,
        D=D,
        ROWS=tiling.rows,
        TILE=tiling.tile,
        SEQUENCES=next_power_of_two(max(B, LEAST_SEQUENCES)),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out
