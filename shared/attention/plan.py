"""Which program reads which keys: decided once a step on the host, for every layer. Introduced in phase 6.1.

A GPU runs a fixed number of programs at once, and a batch's sequences are of any length: one program for each sequence
leaves most of the machine idle while the longest is read. So each step is planned like the jobs of a schedule. The keys
that a tile of queries sees are cut into chunks of one size, each an *item*, which one program takes for one group of
heads; the arrays of a plan say of every item whose it is and which piece. Kernels follow them and decide nothing
(FlashInfer, arXiv 2501.01005).

The chunk is the smallest with which all items are resident together, so that everybody works and nobody waits. Where
there is none, because there are more tiles than programs, or where it would leave a program more than ``IMBALANCE``
times its share of the keys, the chunk is that share: items then queue, and the longest is still short.

Invariants: the items cover each tile's visible keys exactly once; a tile that sees nothing has one item, whose program
stores the zeros; there are at most ``Grid.capacity`` items and ``Grid.max_states`` states; arrays are as long as the
capacity, whatever the step, so that a captured graph can be replayed with another plan, and what lies behind
``num_items`` is zero. Counting is int64, what is sent int32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

IMBALANCE = 2

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """What a plan has to fill: one kernel on one device."""

    resident: int  # items that run at once: resident programs over the groups of heads that each item is for
    unit: int  # tokens of a chunk come in multiples of it: the keys of a kernel's tile
    least_chunk: int  # tokens; a shorter piece is not worth a program

    def capacity(self, num_tiles: int) -> int:
        """The most items of a plan for so many tiles of queries."""
        return self.resident + num_tiles

    def max_states(self, tokens_per_tile: int = 1) -> int:
        """The most states of a plan: a tile that is cut in n leaves n for each of its tokens.

        With chunks of a fair share or more, fewer than ``resident`` tiles are cut, into at most twice as many pieces.
        """
        return 2 * self.resident * tokens_per_tile


@dataclass(frozen=True)
class AttentionPlan:
    """A step's plan on the host. ``rows`` are new tokens: one a sequence when decoding."""

    num_items: Int32s  # [1]
    chunk_size: Int32s  # [1], in tokens
    request_indices: Int32s  # [capacity], of each item
    query_tile_indices: Int32s  # [capacity], which tile of the request's new tokens; 0 when decoding
    kv_tile_indices: Int32s  # [capacity], which chunk of the keys that the tile sees
    query_indptr: Int32s  # [requests + 1], the rows of each
    output_indptr: Int32s  # [rows + 1], the states of each row; none: its item stores the result itself
    tokens_per_tile: int
    is_split: bool  # whether a row may have states; always, where a graph is captured

    @property
    def capacity(self) -> int:
        """Items that a launch has programs for."""
        return len(self.request_indices)

    @property
    def num_rows(self) -> int:
        """New tokens, the padding of a bucket included."""
        return len(self.output_indptr) - 1

    @property
    def num_states(self) -> int:
        """States that are stored in between."""
        return int(self.output_indptr[-1])

    def arrays(self) -> tuple[Int32s, ...]:
        """What has to be sent, for :meth:`shared.engine.staging.Staging.send` together with all else of the step."""
        return (
            self.num_items,
            self.chunk_size,
            self.request_indices,
            self.query_tile_indices,
            self.kv_tile_indices,
            self.query_indptr,
            self.output_indptr,
        )


@dataclass(frozen=True)
class DevicePlan:
    """The arrays of an :class:`AttentionPlan` where kernels read them."""

    num_items: torch.Tensor
    chunk_size: torch.Tensor
    request_indices: torch.Tensor
    query_tile_indices: torch.Tensor
    kv_tile_indices: torch.Tensor
    query_indptr: torch.Tensor
    output_indptr: torch.Tensor
    capacity: int
    num_rows: int
    num_states: int
    tokens_per_tile: int
    is_split: bool

    @classmethod
    def of(cls, plan: AttentionPlan, sent: Sequence[torch.Tensor]) -> Self:
        """``sent`` is what became of ``plan.arrays()``, in that order."""
        num_items, chunk_size, request_indices, query_tile_indices, kv_tile_indices, query_indptr, output_indptr = sent
        return cls(
            num_items,
            chunk_size,
            request_indices,
            query_tile_indices,
            kv_tile_indices,
            query_indptr,
            output_indptr,
            plan.capacity,
            plan.num_rows,
            plan.num_states,
            plan.tokens_per_tile,
            plan.is_split,
        )


def plan_decode(
    lengths: ArrayLike,
    grid: Grid,
    *,
    window: int | None = None,
    num_rows: int | None = None,
    chunk_size: int | None = None,
    is_captured: bool = False,
) -> AttentionPlan:
    """Plan one new token for each of B sequences.

    Args:
        lengths: ``[B]``, tokens of each, the new one included; 0 gives zeros.
        window: of the layers that the plan is for; one plan for each distinct window.
        num_rows: sequences of the bucket that a captured graph serves, at least B; None: B. No item is made for a
            sequence that is only padding: nothing is stored for it.
        chunk_size: tokens a chunk, a multiple of the unit, in place of what is best for this batch: then a sequence's
            result does not depend on the others.
        is_captured: whether the launches are captured, and the plan's successors may be cut where this one is not.

    Raises:
        ValueError: more sequences than ``num_rows``; a chunk that is no multiple; one so small that items exceed the
            capacity.
    """
    counts = np.asarray(lengths, dtype=np.int64)
    B = len(counts)
    num_rows = B if num_rows is None else num_rows
    if num_rows < B:
        raise ValueError(f"there are {B} sequences in a bucket of {num_rows}")
    seen = counts if window is None else np.minimum(counts, window)
    return _plan(
        grid,
        seen,
        np.arange(num_rows + 1, dtype=np.int32),
        tokens_per_tile=1,
        num_rows=num_rows,
        capacity=grid.capacity(num_rows),
        chunk_size=chunk_size,
        is_captured=is_captured,
    )


def plan_prefill(
    num_new_tokens: ArrayLike,
    lengths: ArrayLike,
    grid: Grid,
    *,
    tokens_per_tile: int,
    window: int | None = None,
    num_rows: int | None = None,
    num_requests: int | None = None,
    capacity: int | None = None,
    chunk_size: int | None = None,
    is_captured: bool = False,
) -> AttentionPlan:
    """Plan a ragged batch: several new tokens a sequence, behind what is cached of it.

    A tile of new tokens sees what its first one sees, less what has left the window, up to its last one: that is cut,
    tile by tile, so no item has nothing to do.

    Args:
        num_new_tokens: ``[B]``, possibly 0.
        lengths: ``[B]``, tokens of each sequence, the new ones included.
        tokens_per_tile: of the kernel's tile of queries.
        num_rows, num_requests, capacity: rows, sequences and items of the bucket that a captured graph serves; None: as
            many as there are.

    Raises ValueError as :func:`plan_decode`.
    """
    new = np.asarray(num_new_tokens, dtype=np.int64)
    past = np.asarray(lengths, dtype=np.int64) - new
    B, T = len(new), int(np.add.reduce(new))
    num_requests = B if num_requests is None else num_requests
    if num_requests < B:
        raise ValueError(f"there are {B} sequences in a bucket of {num_requests}")
    query_indptr = np.full(num_requests + 1, T, np.int32)
    query_indptr[:1] = 0
    query_indptr[1 : B + 1] = new.cumsum()
    num_rows = T if num_rows is None else num_rows
    if num_rows < T:
        raise ValueError(f"there are {T} new tokens in a bucket of {num_rows}")
    num_tiles = -(-new // tokens_per_tile)
    requests = np.repeat(np.arange(B), num_tiles)
    query_tiles = np.arange(len(requests)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)
    first = query_tiles * tokens_per_tile
    after = np.minimum(first + tokens_per_tile, new[requests])
    seen = past[requests] + after
    if window is not None:
        seen = seen - np.maximum(past[requests] + first + 1 - window, 0)
    return _plan(
        grid,
        seen,
        query_indptr,
        requests=requests,
        query_tiles=query_tiles,
        tokens=after - first,
        tokens_per_tile=tokens_per_tile,
        num_rows=num_rows,
        capacity=grid.capacity(len(requests)) if capacity is None else capacity,
        chunk_size=chunk_size,
        is_captured=is_captured,
    )


def choose_chunk(units: Int64s, grid: Grid) -> int:
    """Units a chunk for tiles that see ``units`` (at least 1 each); see the module's docstring."""
    least = -(-grid.least_chunk // grid.unit)
    share = max(least, -(-int(np.add.reduce(units)) // grid.resident))
    if len(units) > grid.resident:
        return share
    chunk = smallest_chunk(units, grid.resident, share)
    return share if chunk > IMBALANCE * share else chunk


def smallest_chunk(units: Int64s, budget: int, least: int) -> int:
    """The smallest chunk from ``least`` on with ``Σ ceil(units / chunk) <= budget``, which is at least ``len(units)``.

    FlashInfer's search. Each rounded term is less than 1 above the exact one, so ``total / (budget - len(units))`` is
    large enough, which leaves few steps to bisect.
    """
    # exercise 06.1.1: the smallest chunk with which all items run at once
    # hint: more than the budget at the middle: the answer lies above it; else it is the middle or below
    # hint: ceil(a / b) is (a - 1) // b + 1 for whole numbers from 1 on, for arrays too
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


def _plan(
    grid: Grid,
    seen: Int64s,
    query_indptr: Int32s,
    *,
    requests: Int64s | None = None,
    query_tiles: Int64s | None = None,
    tokens: Int64s | None = None,
    tokens_per_tile: int,
    num_rows: int,
    capacity: int,
    chunk_size: int | None,
    is_captured: bool,
) -> AttentionPlan:
    """The plan of tiles in the order of their rows: how many keys each sees, whose it is, which of that request's, and
    its number of new tokens; None: one tile a request, of one token."""
    units = (np.maximum(seen, 1) + (grid.unit - 1)) // grid.unit
    if chunk_size is None:
        chunk = choose_chunk(units, grid)
    else:
        chunk = chunk_size // grid.unit
        if chunk < 1 or chunk * grid.unit != chunk_size:
            raise ValueError(f"the chunk is {chunk_size} tokens and must be a multiple of {grid.unit}")
    pieces = (units + (chunk - 1)) // chunk
    ends = pieces.cumsum()
    num_items = int(ends[-1]) if len(ends) else 0
    if num_items > capacity:
        raise ValueError(f"chunks of {chunk * grid.unit} tokens make {num_items} items, of which {capacity} have room")
    tiles = np.repeat(np.arange(len(pieces)), pieces)  # of each item
    indices = np.zeros((3, capacity), np.int32)
    indices[0, :num_items] = tiles if requests is None else requests[tiles]
    if query_tiles is not None:
        indices[1, :num_items] = query_tiles[tiles]
    indices[2, :num_items] = np.arange(num_items) - (ends - pieces)[tiles]
    is_split = num_items > len(pieces)
    output_indptr = np.zeros(num_rows + 1, np.int32)
    if is_split:
        states = pieces * (pieces > 1)
        row_ends = (states if tokens is None else np.repeat(states, tokens)).cumsum()
        output_indptr[1 : len(row_ends) + 1] = row_ends
        output_indptr[len(row_ends) + 1 :] = row_ends[-1]
    return AttentionPlan(
        num_items=np.array([num_items], np.int32),
        chunk_size=np.array([chunk * grid.unit], np.int32),
        request_indices=indices[0],
        query_tile_indices=indices[1],
        kv_tile_indices=indices[2],
        query_indptr=query_indptr,
        output_indptr=output_indptr,
        tokens_per_tile=tokens_per_tile,
        is_split=is_captured or is_split,
    )
