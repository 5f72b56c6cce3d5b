"""How much attention each cached key gets from the last queries: what compressors need. Introduced in phase 9.2.

The attention of w queries to n keys is w · n numbers a head, of which compressors need the sums over the queries. Two
launches compute them for all layers and heads without storing the rest: the first finds the maximum and the sum of each
query's softmax, the second adds up the columns.

Invariant: a sum does not depend on timing, so a request that is computed again is compressed to the same cache.
"""

import torch

from shared.kernels.launch import launch, next_power_of_two, tl, triton
from shared.kernels.online_softmax import LOG2_E

TILE = 64


@triton.jit
def load_scores(queries, keys, cells, col, first, last, w, scale, ROWS: tl.constexpr, D: tl.constexpr):
    """Scores [ROWS, TILE] in base 2 of the keys in columns ``col``: -inf for what a query does not see."""
    d = tl.arange(0, D)
    is_key = (col >= first) & (col < last)
    at = tl.load(cells + col, mask=is_key, other=0)
    k = tl.load(keys + at[:, None] * D + d[None, :], mask=is_key[:, None], other=0.0)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    newest = last - w + tl.arange(0, ROWS)  # the column of each query's own key
    return tl.where(is_key[None, :] & (col[None, :] <= newest[:, None]), scores, float("-inf"))


@triton.jit
def window_sums_kernel(
    queries,
    keys,
    cells,
    sizes,
    maxima,
    sums,
    scale,
    n,
    w,
    HQ: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program i has query head i % HQ of layer i // HQ."""
    row = tl.program_id(0)
    layer, head = row // HQ, row % HQ
    of_head = layer * (HQ // GROUP) + head // GROUP
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    q = tl.load(queries + ((layer * w + r[:, None]) * HQ + head) * D + d[None, :], mask=r[:, None] < w, other=0.0)
    cells += of_head.to(tl.int64) * n
    first = n - tl.load(sizes + of_head)
    maximum, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for tile in tl.range(first, n, TILE):
        scores = load_scores(q, keys, cells, tile + tl.arange(0, TILE), first, n, w, scale, ROWS, D)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp2(maximum - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        maximum = new_maximum
    tl.store(maxima + row * w + r, maximum, mask=r < w)
    tl.store(sums + row * w + r, total, mask=r < w)


@triton.jit
def window_mass_kernel(
    queries,
    keys,
    cells,
    sizes,
    maxima,
    sums,
    mass,
    scale,
    n,
    w,
    HQ: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (i, j) adds up the columns of tile j for query head i % HQ of layer i // HQ."""
    row = tl.program_id(0)
    layer, head = row // HQ, row % HQ
    of_head = layer * (HQ // GROUP) + head // GROUP
    r, d = tl.arange(0, ROWS), tl.arange(0, D)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = n - tl.load(sizes + of_head)
    q = tl.load(queries + ((layer * w + r[:, None]) * HQ + head) * D + d[None, :], mask=r[:, None] < w, other=0.0)
    maximum = tl.load(maxima + row * w + r, mask=r < w, other=0.0)
    total = tl.load(sums + row * w + r, mask=r < w, other=1.0)
    scores = load_scores(q, keys, cells + of_head.to(tl.int64) * n, col, first, n, w, scale, ROWS, D)
    shares = tl.where((r < w)[:, None], tl.exp2(scores - maximum[:, None]) / total[:, None], 0.0)
    tl.store(mass + row.to(tl.int64) * n + col, tl.sum(shares, 0), mask=col < n)


def window_mass(
    queries: torch.Tensor, keys: torch.Tensor, cells: torch.Tensor, sizes: torch.Tensor, scale: float
) -> torch.Tensor:
    """The attention of the window, summed over its queries; see ``shared.compression.compressors.window_attention``.

    Args:
        queries: ``[L, w, Hq, D]``, of the newest w tokens, contiguous.
        keys: ``[cells, D]``.
        cells: int64 ``[L, Hkv, n]``, the rows of each head's keys in time order, aligned at the newest.
        sizes: int32 ``[L, Hkv]``, the keys of each head, w at least; what stands before them in ``cells`` is not read.

    Returns:
        fp32 ``[L, Hkv, Hq / Hkv, n]``, 0 for what stands before a head's keys.
    """
    L, w, Hq, D = queries.shape
    _, Hkv, n = cells.shape
    maxima, sums = torch.empty(2, L * Hq, w, dtype=torch.float32, device=queries.device).unbind()
    mass = torch.empty(L, Hkv, Hq // Hkv, n, dtype=torch.float32, device=queries.device)
    about = {"HQ": Hq, "GROUP": Hq // Hkv, "D": D, "ROWS": max(16, next_power_of_two(w)), "TILE": TILE, "num_warps": 4}
    about["num_stages"] = 2
    numbers = scale * LOG2_E, n, w
    launch(window_sums_kernel, (L * Hq,), queries, keys, cells, sizes, maxima, sums, *numbers, **about)
    grid = L * Hq, -(-n // TILE)
    launch(window_mass_kernel, grid, queries, keys, cells, sizes, maxima, sums, mass, *numbers, **about)
    return mass
