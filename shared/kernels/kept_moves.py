"""Moves the kept keys and values of a compressed sequence together. Introduced in phase 9.2.

The first launch copies what each head keeps to a buffer, head after head; the second copies the buffer into the first
cells of the sequence's blocks. What is read by the first may be where the second writes.

Invariant: kept tokens are in the order of :class:`shared.cache.condensed_layout.Packed`.
"""

import torch

from shared.kernels.condensed_attention import cell_rows
from shared.kernels.launch import launch, next_power_of_two, tl, triton
from shared.kernels.window_mass import TABLE, CachedSequence, head_tokens

ROWS = 64


@triton.jit(do_not_specialize=["longest"])
def gather_kept_kernel(
    keys,
    values,
    numbers,
    ends,
    chosen,
    counts,
    kept_keys,
    kept_values,
    longest,
    num_blocks,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS_ABOVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, j) copies tile j of KV head i % Hkv of layer i // Hkv."""
    head = tl.program_id(0)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    kept = tl.load(counts + head)
    if tl.program_id(1) * ROWS < kept:
        heads = tl.arange(0, HEADS_ABOVE)
        target = tl.sum(tl.load(counts + heads, mask=heads < head, other=0), 0).to(tl.int64)
        first_number, count, size = head_tokens(numbers, ends, head, LAYERS * HKV)
        place = tl.load(chosen + head.to(tl.int64) * longest + i, mask=i < kept, other=size)
        at = cell_rows(
            numbers + TABLE, place, size, count, first_number, tl.load(numbers + 3), head // HKV, head % HKV,
            num_blocks, LAYERS, BLOCK_SIZE, HKV, D,
        )  # fmt: skip
        d, is_kept = tl.arange(0, D)[None, :], (i < kept)[:, None]
        to = (target + i)[:, None] * D + d
        tl.store(kept_keys + to, tl.load(keys + at[:, None] + d, mask=is_kept), mask=is_kept)
        tl.store(kept_values + to, tl.load(values + at[:, None] + d, mask=is_kept), mask=is_kept)


@triton.jit(do_not_specialize=["total"])
def scatter_kept_kernel(
    keys,
    values,
    table,
    kept_keys,
    kept_values,
    total,
    num_blocks,
    LAYERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = cell_rows(table, number, total, total, 0, 0, 0, 0, num_blocks, LAYERS, BLOCK_SIZE, HKV, D)
    d, is_kept = tl.arange(0, D)[None, :], (number < total)[:, None]
    source = number.to(tl.int64)[:, None] * D + d
    tl.store(keys + at[:, None] + d, tl.load(kept_keys + source, mask=is_kept), mask=is_kept)
    tl.store(values + at[:, None] + d, tl.load(kept_values + source, mask=is_kept), mask=is_kept)


def move_kept(
    keys: torch.Tensor,
    values: torch.Tensor,
    sequence: CachedSequence,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    most: int,
    total: int,
    table: torch.Tensor,
) -> None:
    """Move the chosen tokens of each head to the first cells of ``table``.

    Args:
        keys, values: ``[L, blocks, block_size, Hkv, D]``, contiguous.
        chosen, counts: as :func:`shared.kernels.key_selection.select_keys` returns them.
        most, total: the largest of ``counts``, and their sum.
        table: int32, the blocks to which the tokens move.
    """
    L, num_blocks, block_size, Hkv, D = keys.shape
    buffers = torch.empty(2, total, D, dtype=keys.dtype, device=keys.device).unbind()
    about = {"LAYERS": L, "BLOCK_SIZE": block_size, "HKV": Hkv, "D": D, "ROWS": ROWS, "num_warps": 4, "num_stages": 1}
    where = sequence.numbers, sequence.ends, chosen, counts, *buffers, chosen.shape[-1], num_blocks
    above = {"HEADS_ABOVE": next_power_of_two(L * Hkv)}
    launch(gather_kept_kernel, (L * Hkv, -(-most // ROWS)), keys, values, *where, **(about | above))
    launch(scatter_kept_kernel, (-(-total // ROWS),), keys, values, table, *buffers, total, num_blocks, **about)
