"""Prefill attention over a paged KV cache: ``flash``. Introduced in phase 6.

The tiled attention of FlashAttention (Dao et al., arXiv 2205.14135) over block tables, for a ragged batch: each
sequence has any number of new tokens and may have cached tokens before them; the keys of both are read from the cache.
The same kernel serves a prompt, a chunk of a prompt, a prompt after a shared prefix, and draft tokens to verify.

As in decoding, the query heads of a KV head share its tiles: a tile's rows are packed (new token, head of the group)
pairs (FlashInfer, arXiv 2501.01005). Token i of n new ones has cache index ``length - n + i`` and attends to no later
one. A program finds its sequence by itself: with R rows per tile, sequence b's tiles begin at ``query_starts[b] · G //
R + b``, which gives each sequence at least as many tiles as it needs; surplus programs return at once.

Invariants: only visible tokens and their block table entries are read; the loop covers the keys that the tile's rows
attend to, whatever the lengths of other sequences; the rest of the batch affects a result only through the tile size.
"""

from dataclasses import dataclass

import torch

from shared.kernels.attention.decode_attention import NO_WINDOW, in_base_2
from shared.kernels.attention.paged_attention import attend_by_sequence
from shared.kernels.attention.prompt_tiles import attend_to_keys
from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton


@dataclass(frozen=True)
class PrefillTiling:
    """The tiling: packed rows and keys per tile, warps and pipeline stages."""

    rows: int
    tile: int
    num_warps: int = 4
    num_stages: int = 2


LEAST_SEQUENCES = 64
"""Number of sequence offsets that a program searches at once: one compiled kernel serves every smaller batch."""


@triton.jit(do_not_specialize=["num_sequences"])
def paged_prefill_kernel(
    q, keys, values, tables, table_starts, lengths, k_scales, v_scales, query_starts, out, num_sequences, scale,
    softcap, window, q_token_stride, q_head_stride,
    BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    # A prompt's last tiles have the most keys, so they start first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
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
        seen = (last_seen - window + 1, last_seen)
        start = tl.maximum(past + first_row // GROUP - window + 1, 0)
        end = tl.minimum(past + (first_row + ROWS - 1) // GROUP + 1, length)
        cache = (keys, values, k_scales, v_scales)
        where = (tables, kv_head, BLOCK_SIZE, HKV, D)
        _, total, weighted = attend_to_keys(
            queries, cache, None, where, kv_head, start, end, seen, None, scale, softcap, TILE
        )
        outputs = (token_of_step * (HKV * GROUP) + head) * D
        tl.store(out + outputs[:, None] + d[None, :], weighted / total[:, None], mask=is_row[:, None])


def prefill_tiling(num_rows: int, num_sequences: int, head_dim: int, itemsize: int) -> PrefillTiling:
    """The tiling for ``num_rows`` packed rows in total: the tile fits the average sequence, as in FlashInfer.

    fp32 does not use tensor cores, and a tile of its products must fit in registers.
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
        keys, values, tables, table_starts, k_scales, v_scales, window, softcap: as
            :func:`shared.kernels.attention.paged_attention.paged_attention`.
        lengths: int32 ``[B]``, each sequence's tokens, the new ones included.
        query_starts: int32 ``[B + 1]``, cumulative sum of the sequences' new tokens, which may be 0, starting at 0. The
            last entry may be less than T: further rows are padding and are not written.
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
        memory = (keys, values, tables, table_starts.tolist(), lengths.tolist())
        num_new = query_starts.diff().tolist()
        return attend_by_sequence(q, *memory, num_new, scale, window, softcap, out, k_scales, v_scales)
    if T == 0:
        return out
    group = Hq // Hkv
    tiling = prefill_tiling(T * group, B, D, q.element_size())
    launch(
        paged_prefill_kernel, (T * group // tiling.rows + B, Hkv),
        q, keys, values, tables, table_starts, lengths, k_scales, v_scales, query_starts, out, B,
        *in_base_2(scale, softcap), NO_WINDOW if window is None else window, q.stride(0), q.stride(1),
        BLOCK_SIZE=block_size, HKV=Hkv, GROUP=group, D=D, ROWS=tiling.rows, TILE=tiling.tile,
        SEQUENCES=next_power_of_two(max(B, LEAST_SEQUENCES)), num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out
