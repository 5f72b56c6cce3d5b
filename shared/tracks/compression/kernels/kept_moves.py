"""Packs the kept keys and values of a compressed sequence together. Introduced in phase 9.2.

The first launch copies the keys that each head keeps to a buffer, head after head; the second copies the buffer into
the first cells of the sequence's blocks. The buffer is needed because the two ranges may overlap.

The second launch also writes each head's count to ``KeptTokens.ends``, ready for the next step.

Invariant: kept tokens are in the order of :class:`shared.tracks.compression.layout.Packed`.
"""

import torch
from torch import Tensor

from shared.kernels.launch import launch, next_power_of_two, tl, triton
from shared.tracks.compression.kernels.condensed_attention import cell_rows
from shared.tracks.compression.kernels.window_mass import TABLE, TABLE_START, CachedSequences, head_tokens

ROWS = 64


@triton.jit(do_not_specialize=["sequence", "width", "longest"])
def gather_kept_kernel(
    keys, values, numbers, ends, chosen, counts, kept_keys, kept_values, sequence, width, longest, num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HEADS_ABOVE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, j) copies tile j of KV head i % Hkv of layer i // Hkv."""
    head = tl.program_id(0)
    numbers += sequence * width
    counts += sequence * (LAYERS * HKV)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    kept = tl.load(counts + head)
    if tl.program_id(1) * ROWS < kept:
        heads = tl.arange(0, HEADS_ABOVE)
        target = tl.sum(tl.load(counts + heads, mask=heads < head, other=0), 0).to(tl.int64)
        first_number, count, size = head_tokens(numbers, ends, head, LAYERS * HKV)
        row = (sequence * (LAYERS * HKV) + head).to(tl.int64) * longest
        index = tl.load(chosen + row + i, mask=i < kept, other=size)
        at = cell_rows(
            index, size, numbers + TABLE, count, first_number, tl.load(numbers + 3), head // HKV, head % HKV,
            num_blocks, LAYERS, BLOCK_SIZE, HKV, D,
        )  # fmt: skip
        d, is_kept = tl.arange(0, D)[None, :], (i < kept)[:, None]
        to = (target + i)[:, None] * D + d
        tl.store(kept_keys + to, tl.load(keys + at[:, None] + d, mask=is_kept), mask=is_kept)
        tl.store(kept_values + to, tl.load(values + at[:, None] + d, mask=is_kept), mask=is_kept)


@triton.jit(do_not_specialize=["sequence", "width", "total", "table_start"])
def scatter_kept_kernel(
    keys, values, numbers, ends, counts, table, kept_keys, kept_values, sequence, width, table_start, total,
    num_blocks,
    LAYERS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HEADS_ABOVE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program i copies tile i; the first also writes the sequence's row of ``ends``."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    HEADS: tl.constexpr = LAYERS * HKV
    if tl.program_id(0) == 0:
        heads = tl.arange(0, HEADS_ABOVE)
        kept = tl.load(counts + sequence * HEADS + heads, mask=heads < HEADS, other=0)
        ends += tl.load(numbers + sequence * width).to(tl.int64) * (HEADS + 2) + 1
        tl.store(ends + heads, tl.cumsum(kept, 0), mask=heads < HEADS)
        PER_BLOCK: tl.constexpr = HEADS * BLOCK_SIZE
        tl.store(ends + HEADS, (total + PER_BLOCK - 1) // PER_BLOCK * BLOCK_SIZE)
    at = cell_rows(number, total, table + table_start, total, 0, 0, 0, 0, num_blocks, LAYERS, BLOCK_SIZE, HKV, D)
    d, is_kept = tl.arange(0, D)[None, :], (number < total)[:, None]
    source = number.to(tl.int64)[:, None] * D + d
    tl.store(keys + at[:, None] + d, tl.load(kept_keys + source, mask=is_kept), mask=is_kept)
    tl.store(values + at[:, None] + d, tl.load(kept_values + source, mask=is_kept), mask=is_kept)


def move_kept(
    keys: Tensor,
    values: Tensor,
    sequences: CachedSequences,
    i: int,
    chosen: Tensor,
    counts: Tensor,
    most: int,
    total: int,
    table: Tensor | None = None,
) -> None:
    """Move the chosen tokens of each head of sequence ``i`` together, and update ``sequences.ends``.

    Args:
        keys, values: ``[L, blocks, block_size, Hkv, D]``, contiguous.
        chosen, counts: from :func:`shared.tracks.compression.kernels.key_selection.select_keys`.
        most, total: the largest of the sequence's ``counts``, and their sum.
        table: int32, the blocks to which the tokens move; None: the first of the sequence.
    """
    L, num_blocks, block_size, Hkv, D = keys.shape
    buffers = torch.empty(2, total, D, dtype=keys.dtype, device=keys.device).unbind()
    options = {"LAYERS": L, "BLOCK_SIZE": block_size, "HKV": Hkv, "D": D, "HEADS_ABOVE": next_power_of_two(L * Hkv)}
    options |= {"ROWS": ROWS, "num_warps": 4, "num_stages": 1}
    where, (numbers, width) = (keys, values, sequences.numbers, sequences.ends), (sequences.numbers, sequences.width)
    sizes = width, chosen.shape[-1], num_blocks
    launch(gather_kept_kernel, (L * Hkv, -(-most // ROWS)), *where, chosen, counts, *buffers, i, *sizes, **options)
    to, start = (numbers, i * width + TABLE_START) if table is None else (table, 0)
    at = width, start, total, num_blocks
    launch(scatter_kept_kernel, (-(-total // ROWS),), *where, counts, to, *buffers, i, *at, **options)
