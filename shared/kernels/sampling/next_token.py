"""Advances a decode step by one token, on the device. Introduced in phase 9.

Between two steps of the same sequences every length and position grows by one, and nothing else changes. So a captured
step can be repeated for the tokens just sampled, without the host planning and uploading the next one. A draft model,
which computes several tokens in a row (phase 11), uses this. Invariant: sequences of length 0, which pad a bucket, are
unchanged.
"""

import torch

from shared.kernels.launch import launch, launches, next_power_of_two, tl, triton


@triton.jit
def next_token_kernel(
    token_ids, positions, offsets, lengths, table_starts, tables, rows, count, block_size, stride, BLOCK: tl.constexpr
):
    n = tl.arange(0, BLOCK)
    length = tl.load(lengths + n, mask=n < count, other=0)
    moves = length > 0
    entry = tl.load(table_starts + n, mask=moves, other=0) + length // block_size
    slot = tl.load(tables + entry, mask=moves, other=0).to(tl.int64) * block_size + length % block_size
    tl.store(token_ids + n, -1 - tl.load(rows + n, mask=moves, other=0), mask=moves)
    tl.store(positions + n, tl.load(positions + n, mask=moves, other=0) + 1, mask=moves)
    tl.store(offsets + n, slot * stride, mask=moves)
    tl.store(lengths + n, length + 1, mask=moves)


def next_token(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    table_starts: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    *,
    block_size: int,
    stride: int,
) -> None:
    """Change the arrays of B sequences with one new token each into those of the next token, in place.

    Args:
        token_ids, positions, offsets: int64 ``[B]`` or more. The id becomes the last one sampled for the sequence's row
            (:mod:`shared.kernels.sampling.pending_ids`), and the offset becomes the new token's.
        lengths, table_starts: int32 ``[B]`` or more, as in
            :func:`shared.kernels.attention.paged_attention.paged_attention`.
        tables: int32, the block tables, end to end; each holds the block of the new token.
        rows: int64 ``[B]``, the rows of the sequences in the pool.
        block_size, stride: tokens of a block, and the distance between the offsets of adjacent slots.
    """
    B = len(rows)
    if launches(token_ids):
        arrays = (token_ids, positions, offsets, lengths, table_starts, tables, rows)
        launch(next_token_kernel, (1,), *arrays, B, block_size, stride, BLOCK=next_power_of_two(B))
        return
    blocks = tables[table_starts[:B] + lengths[:B] // block_size].long()
    offsets[:B] = (blocks * block_size + lengths[:B] % block_size) * stride
    token_ids[:B] = -1 - rows
    positions[:B] += 1
    lengths[:B] += 1
