"""Plans attention: assigns keys to programs, once a step on the host, for every layer. Introduced in phase 6.1.

A GPU runs a fixed number of programs at once, and the sequences of a batch vary in length: with one program per
sequence, most of the GPU idles while the longest is read. So each step's attention is planned. The keys that a tile of
queries attends to are divided into *splits* of one size; the last may be shorter. An *item* is a tile with one of its
splits, computed by one program for one group of heads. A plan's arrays give the request, the tile and the split of
every item; the kernels only follow them (FlashInfer, arXiv 2501.01005).

The split size is the smallest one at which all items are resident at once, so that every program is busy and no item
waits. There may be no such size, because there are more tiles than programs, or it may leave a program with more than
``IMBALANCE`` times its share of the keys. Then the split size is that share: items queue, but each is short. When items
of prompts queue, those with the most keys go first, so that no long item starts when the others are ending.

Invariants: the items cover each tile's visible keys exactly once; a tile without visible keys has one item, whose
program stores zeros; the limits of :mod:`shared.attention.descriptor`. Counting uses int64, the arrays are int32.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shared.attention.descriptor import AttentionPlan, Grid, Int32s

IMBALANCE = 2
MANY_SPLITS, LONG_SPLIT = 32, 128
"""A tile has more than MANY_SPLITS splits only if each has LONG_SPLIT tokens: merging their states takes time too."""

Int64s = NDArray[np.int64]


def plan_decode(
    lengths: ArrayLike,
    grid: Grid,
    *,
    window: int | None = None,
    num_rows: int | None = None,
    split_size: int | None = None,
    is_captured: bool = False,
) -> AttentionPlan:
    """Plan one new token for each of B sequences.

    Args:
        lengths: ``[B]``, tokens of each sequence, the new one included; 0 gives zeros.
        window: the sliding window of the layers that the plan is for; None: full attention.
        num_rows: sequences of a captured graph's bucket, at least B; None: B. Padding sequences get no item and no
            output.
        split_size: tokens per split, a multiple of the unit; None: chosen for this batch. With a fixed size, a
            sequence's result does not depend on the batch.
        is_captured: whether the launches are captured in a CUDA graph, so that later plans may split where this one
            does not.

    Raises ValueError for more sequences than ``num_rows``, and for a split size that is not a multiple of the unit, or
    so small that the items exceed the capacity.
    """
    counts = np.asarray(lengths, dtype=np.int64)
    B = len(counts)
    num_rows = B if num_rows is None else num_rows
    if num_rows < B:
        raise ValueError(f"there are {B} sequences in a bucket of {num_rows}")
    seen = counts if window is None else np.minimum(counts, window)
    sizes: dict[str, Any] = {"tokens_per_tile": 1, "num_rows": num_rows, "capacity": grid.capacity(num_rows)}
    query_indptr = np.arange(num_rows + 1, dtype=np.int32)
    return _plan(grid, seen, query_indptr, **sizes, split_size=split_size, is_captured=is_captured)


def plan_prefill(
    num_new_tokens: ArrayLike,
    lengths: ArrayLike,
    grid: Grid,
    *,
    tokens_per_tile: int,
    window: int | None = None,
    has_masks: bool = False,
    first_row: int = 0,
    num_rows: int | None = None,
    num_requests: int | None = None,
    capacity: int | None = None,
    split_size: int | None = None,
    is_captured: bool = False,
) -> AttentionPlan:
    """Plan a ragged batch: several new tokens per sequence, which follow its cached tokens.

    A tile of new tokens attends from the first key in its first token's window to its last token's own key. This range
    is split tile by tile, so every item has keys.

    Args:
        num_new_tokens: ``[B]``, possibly 0.
        lengths: ``[B]``, tokens of each sequence, the new ones included.
        tokens_per_tile: tokens of the kernel's query tile.
        has_masks: whether new tokens may be mask tokens (phase 11.1). Their position in the text is earlier than in the
            cache, so the keys of every tile begin in the window of the sequence's first new token.
        first_row: the row of the first new token, if the step's first rows belong to other sequences.
        num_rows, num_requests, capacity: rows, sequences and items of a captured graph's bucket; None: those of this
            batch.

    Raises ValueError as :func:`plan_decode`.
    """
    new = np.asarray(num_new_tokens, dtype=np.int64)
    past = np.asarray(lengths, dtype=np.int64) - new
    B, T = len(new), first_row + int(np.add.reduce(new))
    num_requests = B if num_requests is None else num_requests
    if num_requests < B:
        raise ValueError(f"there are {B} sequences in a bucket of {num_requests}")
    query_indptr = np.full(num_requests + 1, T, np.int32)
    query_indptr[:1] = first_row
    query_indptr[1 : B + 1] = first_row + new.cumsum()
    num_rows = T if num_rows is None else num_rows
    if num_rows < T:
        raise ValueError(f"there are {T} rows in a bucket of {num_rows}")
    num_tiles = -(-new // tokens_per_tile)
    requests = np.repeat(np.arange(B), num_tiles)
    query_tiles = np.arange(len(requests)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)
    first = query_tiles * tokens_per_tile
    after = np.minimum(first + tokens_per_tile, new[requests])
    seen = past[requests] + after
    if window is not None:
        seen = seen - np.maximum(past[requests] + (0 if has_masks else first) + 1 - window, 0)
    return _plan(
        grid,
        seen,
        query_indptr,
        requests=requests,
        query_tiles=query_tiles,
        tokens=after - first,
        first_row=first_row,
        tokens_per_tile=tokens_per_tile,
        num_rows=num_rows,
        capacity=grid.capacity(len(requests)) if capacity is None else capacity,
        split_size=split_size,
        is_captured=is_captured,
    )


def choose_split(units: Int64s, grid: Grid) -> int:
    """Units per split for tiles that attend to ``units`` units (at least 1 each); see the module's docstring."""
    few = min(LONG_SPLIT, int(np.maximum.reduce(units, initial=1)) * grid.unit // MANY_SPLITS)
    least = -(-max(grid.least_split, few) // grid.unit)
    share = max(least, -(-int(np.add.reduce(units)) // grid.resident))
    if len(units) > grid.resident:
        return share
    split = smallest_split(units, grid.resident, share)
    return share if split > IMBALANCE * share else split


def smallest_split(units: Int64s, budget: int, least: int) -> int:
    """The smallest split, from ``least`` units on, with ``Σ ceil(units / split) <= budget`` (at least one for each
    tile).

    FlashInfer's search. Rounding up adds less than 1 to each term, so ``total / (budget - len(units))`` is an upper
    bound, and the bisection takes only a few steps.
    """
    # exercise 06.1x1: the smallest split with which all items run at once
    # hint: if the middle exceeds the budget, the answer is above it; otherwise it is the middle or below
    # hint: ceil(a / b) is (a - 1) // b + 1 for positive integers, for arrays too
    spare, low, high = budget - len(units), least, max(least, int(np.maximum.reduce(units, initial=1)))
    if spare > 0:
        high = max(low, min(high, -(-int(np.add.reduce(units)) // spare)))
    whole = units - 1
    while low < high:
        middle = (low + high) // 2
        if np.add.reduce(whole // middle) > spare:
            low = middle + 1
        else:
            high = middle
    return low
    # end exercise


def items_of(num_splits: Int64s) -> tuple[Int64s, Int64s]:
    """The query tile and the split of each item. Tile i has ``num_splits[i]`` consecutive items."""
    # exercise 06.1x3: the tile and the split of each item
    # hint: repeat tile i num_splits[i] times: np.repeat
    # hint: an item's split is its index minus the index of its tile's first item
    # hint: the index of a tile's first item is the number of splits of all earlier tiles: cumsum minus its own splits
    tiles = np.repeat(np.arange(len(num_splits)), num_splits)
    first_items = num_splits.cumsum() - num_splits
    return tiles, np.arange(len(tiles)) - first_items[tiles]
    # end exercise


def state_offsets(num_splits: Int64s, num_rows: int) -> Int32s:
    """``output_indptr [num_rows + 1]``: row i has states ``output_indptr[i]`` to ``output_indptr[i + 1]``, one for each
    of its ``num_splits``. A row with one split has none, since its item stores the output itself; padding has none
    either."""
    # exercise 06.1x4: the states of each row
    # hint: count the states of each row first; how many has a row of one split?
    # hint: a row's states end where the next row's begin: the cumulative sum of the counts
    # hint: padding rows have no states, so they begin and end at the same offset
    offsets = np.zeros(num_rows + 1, np.int32)
    ends = (num_splits * (num_splits > 1)).cumsum()
    offsets[1 : len(ends) + 1] = ends
    offsets[len(ends) + 1 :] = offsets[len(ends)]
    return offsets
    # end exercise


def _plan(
    grid: Grid,
    seen: Int64s,
    query_indptr: Int32s,
    *,
    requests: Int64s | None = None,
    query_tiles: Int64s | None = None,
    tokens: Int64s | None = None,
    first_row: int = 0,
    tokens_per_tile: int,
    num_rows: int,
    capacity: int,
    split_size: int | None,
    is_captured: bool,
) -> AttentionPlan:
    """Plan tiles in the order of their rows, from the number of keys that each attends to (``seen``), its request, its
    index in that request, and its new tokens. None: one tile of one token per request."""
    units = (np.maximum(seen, 1) + (grid.unit - 1)) // grid.unit
    if split_size is None:
        split = choose_split(units, grid)
    else:
        split = split_size // grid.unit
        if split < 1 or split * grid.unit != split_size:
            raise ValueError(f"the split size is {split_size} tokens and must be a multiple of {grid.unit}")
    num_splits = (units + (split - 1)) // split
    num_items = int(np.add.reduce(num_splits))
    if num_items > capacity:
        raise ValueError(f"splits of {split * grid.unit} tokens make {num_items} items; the capacity is {capacity}")
    tiles, kv_tiles = items_of(num_splits)
    if query_tiles is not None and num_items > grid.resident:
        order = np.argsort(-np.minimum(units[tiles] - kv_tiles * split, split), kind="stable")
        tiles, kv_tiles = tiles[order], kv_tiles[order]
    indices = np.zeros((3, capacity), np.int32)
    indices[0, :num_items] = tiles if requests is None else requests[tiles]
    if query_tiles is not None:
        indices[1, :num_items] = query_tiles[tiles]
    indices[2, :num_items] = kv_tiles
    is_split = num_items > len(num_splits)
    if is_split:
        of_rows = num_splits if tokens is None else np.repeat(num_splits, tokens)
        output_indptr = state_offsets(np.append(np.ones(first_row, np.int64), of_rows), num_rows)
    else:
        output_indptr = np.zeros(num_rows + 1, np.int32)
    counts = np.array([num_items], np.int32), np.array([split * grid.unit], np.int32)
    items = indices[0], indices[1], indices[2], query_indptr, output_indptr
    return AttentionPlan(*counts, *items, tokens_per_tile, is_captured or is_split)
