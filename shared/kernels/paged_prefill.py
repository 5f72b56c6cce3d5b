"""Attention of several new tokens a sequence over blocks of memory: ``flash`` for prompts. Introduced in phase 6.

The tiled attention of FlashAttention (Dao et al., arXiv 2205.14135) over block tables, for a ragged batch: each
sequence brings any number of new tokens and may have tokens in memory before them, all of which, the new ones too, are
read from there. It serves a prompt, a piece of a prompt, a prompt behind a shared prefix, and drafted tokens that are
to be verified alike.

As in decoding, the query heads of a key head share its tiles: a tile's rows are (new token, head of the group) pairs,
packed (FlashInfer, arXiv 2501.01005). Token i of n new ones stands at cache index ``length - n + i`` and sees no later
one. Which sequence a program works for it finds itself: with R rows a tile, sequence b's tiles begin at
``query_starts[b] · G // R + b``, which leaves each at least the tiles that it needs; the few that are left over return
at once.

Invariants: only visible tokens are read, and of a table only their entries; the loop runs over what the tile's rows can
see, whatever the others' lengths; a result does not depend on who else is in the batch, but for the choice of the tile.
"""

from dataclasses import dataclass

import torch

from shared.kernels.decode_attention import NO_WINDOW
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton
from shared.kernels.online_softmax import add_tile, in_base_2
from shared.kernels.paged_attention import gathered, token_rows
from shared.ops.attention import sdpa_attention


@dataclass(frozen=True)
class PrefillTiling:
    """How the work is cut: packed rows and keys a tile, warps and pipeline stages."""

    rows: int
    tile: int
    num_warps: int = 4
    num_stages: int = 2


LEAST_SEQUENCES = 64
"""Begins of sequences that a program searches at once: one kernel then serves every smaller batch."""


@triton.jit(do_not_specialize=["num_sequences"])
def paged_prefill_kernel(
    q,
    keys,
    values,
    tables,
    table_starts,
    lengths,
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
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, D], tl.float32)
        # Blocks are looked up a tile ahead: the copies of a tile then wait for no look-up, and run behind each other.
        rows = token_rows(tables, start + tl.arange(0, TILE), end, kv_head, BLOCK_SIZE, HKV, D)
        for tile in tl.range(start, end, TILE):
            place = tile + tl.arange(0, TILE)
            is_key = place < end
            tokens = rows[:, None] + d[None, :]
            rows = token_rows(tables, place + TILE, end, kv_head, BLOCK_SIZE, HKV, D)
            k = tl.load(keys + tokens, mask=is_key[:, None], other=0.0)  # [TILE, D]
            v = tl.load(values + tokens, mask=is_key[:, None], other=0.0)
            is_visible = (place[None, :] <= last_seen[:, None]) & (place[None, :] >= first_seen[:, None])
            maximum, total, weighted = add_tile(
                queries, k, v, is_visible, maximum, total, weighted, scale, softcap, HAS_SOFTCAP
            )
        outputs = (token_of_step * (HKV * GROUP) + head) * D
        tl.store(out + outputs[:, None] + d[None, :], weighted / total[:, None], mask=is_row[:, None])


def prefill_tiling(num_rows: int, num_sequences: int, head_dim: int, itemsize: int) -> PrefillTiling:
    """The tiling for ``num_rows`` packed rows in all: the tile fits the average sequence's, as FlashInfer's does.

    fp32 has no tensor cores, and a tile of its products stands in registers.
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`shared.ops.attention.naive_attention` of each of B sequences' new tokens, laid end to end.

    Args:
        q: ``[T, Hq, D]``; its heads may lie apart, the numbers of a head not.
        keys, values, tables, table_starts: as in :func:`shared.kernels.paged_attention.paged_attention`.
        lengths: int32 ``[B]``, each sequence's tokens, the new ones last; at least as many as are new.
        query_starts: int32 ``[B + 1]``, the running sum of the sequences' new tokens, which may be 0, from 0 on. Its
            last may be less than T: rows behind it belong to nobody and are not written.
        window: see only the last ``window`` tokens, the token itself included.
        softcap: scores become ``c · tanh(scores / c)``.
        out: where the result goes, ``[T, Hq, D]`` contiguous; None: new memory.

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
                k, v = gathered(keys, values, tables, start, first, length)
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
