"""The loops over the keys that a tile of prompt tokens attends to. Introduced in phase 6.

Most tiles of keys are visible to every token of a tile of queries and need no mask; only those at both ends do. An
unmasked score takes half as many instructions as a masked one, and the tensor cores wait for instructions and
exponentials (FlashAttention-2, arXiv 2307.08691). Softmax does not depend on the order of its keys, so the tiles
without masks come first, in a separate loop.

Invariant: keys outside ``start`` to ``end`` have no weight; when loaded from blocks, they are zeros.
"""

from shared.kernels.attention.online_softmax import add_tile
from shared.kernels.attention.paged_attention import token_rows
from shared.kernels.e4m3 import for_product, scale_of, widened
from shared.kernels.launch import tl, triton


@triton.jit
def attend_to_keys(
    queries, cache, copied, where, kv_head, start, end, seen, own, scale, softcap, TILE: tl.constexpr
):  # fmt: skip
    """Attend to the keys from ``start`` to ``end`` of a KV head; returns maximum, total and weighted values, like
    :func:`shared.kernels.attention.online_softmax.add_tile`.

    Args:
        queries: ``[ROWS, D]``.
        cache: keys, values, and their scales, as :func:`shared.kernels.attention.online_softmax.attend` takes them.
        copied: the descriptor of a copy of them (:mod:`shared.kernels.attention.prompt_keys`); None: there is none.
        where: without a copy, the last arguments of :func:`token_rows`; with one, the rows of the first key and of its
            value, and the column.
        seen: the first and the last key that each query attends to, ``[ROWS]``, both ascending.
        own: like ``seen``, for further keys that a query attends to; then every tile has a mask. None: none.
    """
    ROWS: tl.constexpr = queries.shape[0]
    D: tl.constexpr = queries.shape[1]
    keys, values, k_scales, v_scales = cache
    queries = for_product(queries, keys)
    scale *= scale_of(k_scales, kv_head, keys)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D], tl.float32)
    first, last = seen
    inner = start + tl.cdiv(tl.maximum(tl.max(first, 0) - start, 0), TILE) * TILE
    num_inner = tl.maximum(tl.minimum(tl.min(last, 0) + 1, end) - inner, 0) // TILE
    if own is None:
        maximum, total, weighted = add_tiles(
            queries, keys, values, copied, where, inner, num_inner, 0, 0, end, None, None, maximum, total, weighted,
            scale, softcap, TILE,
        )  # fmt: skip
    else:
        num_inner = 0
    num_masked = tl.cdiv(tl.maximum(end - start, 0), TILE) - num_inner
    maximum, total, weighted = add_tiles(
        queries, keys, values, copied, where, start, num_masked, inner, num_inner * TILE, end, seen, own, maximum,
        total, weighted, scale, softcap, TILE,
    )  # fmt: skip
    return maximum, total, weighted * scale_of(v_scales, kv_head, values)


@triton.jit
def add_tiles(
    queries, keys, values, copied, where, start, num_tiles, gap, gap_size, end, seen, own, maximum, total, weighted,
    scale, softcap, TILE: tl.constexpr,
):  # fmt: skip
    """Update the state of :func:`add_tile` with ``num_tiles`` tiles of keys from ``start`` on, skipping ``gap_size``
    keys at ``gap``. ``seen`` None: every query attends to all keys."""
    t, d = tl.arange(0, TILE), tl.arange(0, queries.shape[1])
    if copied is None:  # block table entries are loaded one tile ahead, so that a tile's loads do not wait for a lookup
        rows = token_rows(start + tl.where(start >= gap, gap_size, 0) + t, end, *where)
    for n in tl.range(num_tiles):
        tile = start + n * TILE
        tile += tl.where(tile >= gap, gap_size, 0)
        place = tile + t
        if copied is None:
            at = rows[:, None] + d[None, :]
            after = start + (n + 1) * TILE
            rows = token_rows(after + tl.where(after >= gap, gap_size, 0) + t, end, *where)
            k = widened(tl.load(keys + at, mask=(place < end)[:, None], other=0.0), queries.dtype)  # [TILE, D]
            v = widened(tl.load(values + at, mask=(place < end)[:, None], other=0.0), queries.dtype)
        else:
            k = copied.load([where[0] + tile, where[2]])
            v = copied.load([where[1] + tile, where[2]])
        is_visible = None
        if seen is not None:
            first, last = seen
            is_visible = (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None])
            if own is not None:
                first_own, last_own = own
                is_visible |= (place[None, :] >= first_own[:, None]) & (place[None, :] <= last_own[:, None])
            is_visible &= place[None, :] < end
        maximum, total, weighted = add_tile(queries, k, v, is_visible, maximum, total, weighted, scale, softcap)
    return maximum, total, weighted
