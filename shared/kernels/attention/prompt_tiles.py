"""The loops over the keys that a tile of prompt tokens attends to. Introduced in phase 6.

Most tiles of keys are visible to every token of a tile of queries and need no mask; only those at the two ends do. An
unmasked score takes half the instructions of a masked one, and it is instructions and exponentials that keep the tensor
cores waiting (FlashAttention-2, arXiv 2307.08691). Softmax does not depend on the order of its keys, so the tiles
without masks come first, in a loop of their own.

Invariant: keys outside ``start`` to ``end`` have no weight; they are loaded as zeros, or as what the copy holds.
"""

from shared.kernels.attention.online_softmax import add_tile
from shared.kernels.attention.paged_attention import token_rows
from shared.kernels.e4m3 import widened
from shared.kernels.launch import tl, triton


@triton.jit
def attend_to_keys(
    queries,
    source,
    start,
    end,
    first,
    last,
    own,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    IS_COPIED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """The states of ROWS queries over the keys from ``start`` to ``end``: maximum ``[ROWS]``, total ``[ROWS]`` and
    weighted values ``[ROWS, D]``, as :func:`shared.kernels.attention.online_softmax.add_tile` keeps them.

    Args:
        queries: ``[ROWS, D]``.
        source: where keys and values are: (keys, values, the sequence's block table, the KV head), or with IS_COPIED
            (the descriptor of the copy, the row of the sequence's first key, that of its first value, the KV head).
        first, last: ``[ROWS]``, the first and the last key that each query attends to, which both ascend.
        own: None, or a first and a last key ``[ROWS]`` of a second range; no tile is then without a mask.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    # Tiles that every query sees whole begin at `inner`; the masked ones are those before and after them.
    inner = start + tl.cdiv(tl.maximum(tl.max(first, 0) - start, 0), TILE) * TILE
    num_inner = tl.maximum(tl.minimum(tl.min(last, 0) + 1, end) - inner, 0) // TILE
    if own is None:
        maximum, total, weighted = add_tiles(
            queries,
            source,
            inner,
            num_inner,
            0,
            0,
            end,
            None,
            None,
            None,
            maximum,
            total,
            weighted,
            scale,
            softcap,
            HAS_SOFTCAP,
            IS_COPIED,
            BLOCK_SIZE,
            HKV,
            D,
            TILE,
        )
    else:
        num_inner = 0
    num_masked = tl.cdiv(tl.maximum(end - start, 0), TILE) - num_inner
    return add_tiles(
        queries,
        source,
        start,
        num_masked,
        inner,
        num_inner * TILE,
        end,
        first,
        last,
        own,
        maximum,
        total,
        weighted,
        scale,
        softcap,
        HAS_SOFTCAP,
        IS_COPIED,
        BLOCK_SIZE,
        HKV,
        D,
        TILE,
    )


@triton.jit
def add_tiles(
    queries,
    source,
    start,
    num_tiles,
    gap,
    gap_size,
    end,
    first,
    last,
    own,
    maximum,
    total,
    weighted,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    IS_COPIED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update states with ``num_tiles`` tiles from ``start`` on, leaving out ``gap_size`` keys from ``gap`` on. Without
    ``first`` every query attends to every key of them."""
    t, d = tl.arange(0, TILE), tl.arange(0, D)
    if not IS_COPIED:  # block table entries are loaded a tile ahead, so that a tile's loads do not wait for a lookup
        place = start + tl.where(start >= gap, gap_size, 0) + t
        tokens = token_rows(source[2], place, end, source[3], BLOCK_SIZE, HKV, D)
    for n in tl.range(num_tiles):
        tile = start + n * TILE
        tile += tl.where(tile >= gap, gap_size, 0)
        place = tile + t
        if IS_COPIED:
            k = source[0].load([source[1] + tile, source[3] * D])
            v = source[0].load([source[2] + tile, source[3] * D])
        else:
            at = tokens[:, None] + d[None, :]
            after = start + (n + 1) * TILE
            after += tl.where(after >= gap, gap_size, 0)
            tokens = token_rows(source[2], after + t, end, source[3], BLOCK_SIZE, HKV, D)
            k = widened(tl.load(source[0] + at, mask=(place < end)[:, None], other=0.0), queries.dtype)
            v = widened(tl.load(source[1] + at, mask=(place < end)[:, None], other=0.0), queries.dtype)
        is_visible = None
        if first is not None:
            is_visible = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None])
            if own is not None:
                is_visible |= (place[None, :] >= own[0][:, None]) & (place[None, :] <= own[1][:, None])
            is_visible &= place[None, :] < end
        maximum, total, weighted = add_tile(
            queries, k, v, is_visible, maximum, total, weighted, scale, softcap, HAS_SOFTCAP
        )
    return maximum, total, weighted
