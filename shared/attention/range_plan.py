"""Plans attention over several ranges of keys, on the host. Introduced in phase 9.1.

A sequence that is made of chunks attends to ranges of keys: its chunks, each with a block table and an offset in the
sequence, and its own tokens. A *tile* is up to ``tokens_per_tile`` queries that attend to the same ranges. There are
two kinds: the new tokens of one sequence, with its own tokens and the chunks that it alone reads in this step; and the
queries of several sequences, with a chunk that they share, so that its keys are read once for all (FlashInfer calls
this cascade attention; arXiv 2501.01005). Each query of a tile has a *slot*. The ranges of a tile are laid end to end,
and cut into splits of one size as in phase 6.1: an *item* is a tile and a split. Its keys are *pieces* of ranges.

A query in several tiles, or whose tile has several splits, has a state for each, which merge as in phase 6.1.

Invariants: each query attends to each of its visible keys in exactly one item; a plan never exceeds the ``limits`` of
its planner, unless its tiles of single sequences alone do; the plan of a decode step serves until a position leaves its
interval of ``SLACK`` positions, so most steps upload none.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shared.attention.descriptor import Grid, Int32s
from shared.attention.plan import choose_split, items_of, state_offsets

Int64s = NDArray[np.int64]
Array = TypeVar("Array", Int32s, torch.Tensor)
SLACK = 256  # positions
LEAST_SAVED = 256  # keys; a chunk is shared if that saves at least so many reads, since each tile costs states


@dataclass(frozen=True)
class Ranges:
    """R ranges of the sequences of a step, those of a sequence in order; a chunk has a table, in ``tables``."""

    sequences: Int64s  # [R], index in the batch
    offsets: Int64s  # [R], where the range begins in its sequence
    lengths: Int64s  # [R], in tokens
    chunks: Int64s  # [R], index of the chunk
    tables: Int32s  # the blocks of all chunks, concatenated
    table_starts: Int64s  # [chunks], in ``tables``

    @classmethod
    def of(cls, ranges: Sequence[Any]) -> Self:
        """From the fields ``sequence``, ``offset``, ``length`` and ``blocks`` of each range; equal first blocks are
        the same chunk."""
        blocks = {int(one.blocks[0]): one.blocks for one in ranges}
        number = {first: n for n, first in enumerate(blocks)}
        numbers = [(one.sequence, one.offset, one.length, number[int(one.blocks[0])]) for one in ranges]
        sizes = np.array([len(table) for table in blocks.values()], np.int64)
        sequences, offsets, lengths, chunks = np.array(numbers, np.int64).reshape(-1, 4).T
        tables = np.concatenate([*blocks.values()])
        return cls(sequences, offsets, lengths, chunks, tables, sizes.cumsum() - sizes)

    @property
    def saved(self) -> Int64s:
        """Keys ``[chunks]`` that are not read if each chunk is read once."""
        places = np.bincount(self.chunks, minlength=len(self.table_starts))
        lengths = np.zeros(len(places), np.int64)
        lengths[self.chunks] = self.lengths
        return (places - 1) * lengths

    @cached_property
    def is_shared(self) -> bool:
        """Whether a chunk is worth reading once for several sequences."""
        return bool((self.saved >= LEAST_SAVED).any())


@dataclass(frozen=True)
class RangePlan(Generic[Array]):
    """A plan, on the host or on the device.

    The query of a slot, at ``position``, sees the keys of a piece whose number in the range is at most ``position -
    base - offset``, with the piece's base and the slot's offset. First it is moved back by ``turn + offset`` positions.
    """

    num_items: Array  # [1]
    item_slots: Array  # [items], the first slot of the item's tile
    item_counts: Array  # [items], the slots of the tile
    item_splits: Array  # [items], the item's index among those of its tile
    item_pieces: Array  # [items + 1], the pieces of each item
    piece_tables: Array  # [pieces], where the range's table begins in ``tables``; -1 - b: sequence b's own table
    piece_turns: Array  # [pieces]
    piece_bases: Array  # [pieces]
    piece_begins: Array  # [pieces], the first key
    piece_ends: Array  # [pieces], the first key after the piece
    slot_rows: Array  # [slots], the query: a new token of the step
    slot_offsets: Array  # [slots]
    slot_states: Array  # [slots], the first state of the slot's query in this tile; -1: the item stores the output
    output_indptr: Array  # [rows + 1], the states of each query

    def arrays(self) -> dict[str, Array]:
        """All arrays, by name; ``output_indptr`` is the last."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def num_states(self) -> int:
        """Number of intermediate states."""
        return int(self.output_indptr[-1])


@dataclass(frozen=True)
class RangeLimits:
    """The sizes of a captured step's arrays."""

    rows: int
    slots: int
    items: int
    pieces: int
    states: int

    @classmethod
    def of(cls, rows: int, grid: Grid, tokens_per_tile: int) -> Self:
        """For steps of ``rows`` new tokens: three shared chunks for each, on average, and eight pieces a tile."""
        slots = 4 * rows + 64
        return cls(
            rows, slots, grid.resident + slots, 8 * (grid.resident + slots), max_states(slots, grid, tokens_per_tile)
        )

    def __or__(self, other: Self) -> Self:
        """The limits for plans of either kind."""
        return type(self)(*map(max, astuple(self), astuple(other)))

    def hold(self, plan: RangePlan[Int32s]) -> bool:
        """Whether a plan fits."""
        sizes = (len(plan.output_indptr) - 1, len(plan.slot_rows), len(plan.item_slots), len(plan.piece_tables))
        return all(size <= most for size, most in zip((*sizes, plan.num_states), astuple(self), strict=True))


def max_states(slots: int, grid: Grid, tokens_per_tile: int) -> int:
    """Maximum number of states: one for each slot, and those of the tiles of several splits (``Grid.max_states``)."""
    return slots + grid.max_states(tokens_per_tile)


def plan_ranges(
    ranges: Ranges,
    num_new: Int64s,
    first: Int64s,
    last: Int64s,
    grid: Grid,
    *,
    tokens_per_tile: int,
    most_shared_slots: int,
    num_rows: int,
    window: int | None = None,
) -> RangePlan[Int32s]:
    """Plan a step.

    Args:
        num_new: ``[B]``, new tokens of each sequence, at least 1.
        first, last: ``[T]``, the least and greatest position that each new token may have when the plan is used.
        num_rows: T, or the rows of a captured launch.
        most_shared_slots: chunks whose queries would need more slots are read for each sequence.
        window: queries attend to the last ``window`` positions only.
    """
    tiles = _Tiles.of(ranges, num_new, first, last, tokens_per_tile, most_shared_slots)
    at, pieces = _ranges_of_tiles(tiles, ranges, num_new, first, last, window)
    # Ranges of a tile end to end, in units of the kernel's key tile: the unit numbers of all tiles' splits.
    units = -(-(pieces["end"] - pieces["begin"]) // grid.unit)
    of_tiles = np.bincount(at, units, len(tiles.counts)).astype(np.int64)
    split = choose_split(of_tiles[of_tiles > 0], grid)
    num_splits = -(-of_tiles // split)
    item_tiles, item_splits = items_of(num_splits)
    before = units.cumsum() - units
    in_tile = before - (of_tiles.cumsum() - of_tiles)[at]
    start = (num_splits.cumsum() - num_splits)[at] * split + in_tile
    # A range gives a piece to each split that it reaches into.
    reached = (start + units - 1) // split - start // split + 1
    of, nth = items_of(reached)
    items = start[of] // split + nth
    begins = np.maximum(items * split, start[of]) - start[of]
    ends = np.minimum((items + 1) * split - start[of], units[of])
    first_key = pieces["begin"][of]
    slot_splits = num_splits.repeat(tiles.counts)
    of_rows = np.bincount(tiles.rows, slot_splits, len(first)).astype(np.int64)
    order = tiles.rows.argsort(kind="stable")
    counted = (slot_splits * (of_rows > 1)[tiles.rows])[order]
    states = np.full(len(order), -1)
    states[order] = np.where((of_rows > 1)[tiles.rows[order]], counted.cumsum() - counted, -1)
    found = (
        [len(item_tiles)],
        (tiles.counts.cumsum() - tiles.counts)[item_tiles],
        tiles.counts[item_tiles],
        item_splits,
        np.append(0, np.bincount(items, minlength=len(item_tiles)).cumsum()),
        pieces["table"][of],
        pieces["turn"][of],
        pieces["base"][of],
        first_key + begins * grid.unit,
        np.minimum(first_key + ends * grid.unit, pieces["end"][of]),
        tiles.rows,
        tiles.offsets,
        states,
        state_offsets(of_rows, num_rows),
    )
    return RangePlan(*(np.asarray(array, np.int32) for array in found))


@dataclass(frozen=True)
class _Tiles:
    """The tiles of a step: those of single sequences, then those of shared chunks."""

    counts: Int64s  # [tiles], slots
    owners: Int64s  # [tiles], the sequence, or -1 - chunk
    rows: Int64s  # [slots]
    offsets: Int64s  # [slots], of the shared chunk; 0 in a tile of a single sequence
    is_shared: NDArray[np.bool_]  # [R], the ranges that are read in tiles of shared chunks

    @classmethod
    def of(cls, ranges: Ranges, num_new: Int64s, first: Int64s, last: Int64s, size: int, most: int) -> Self:
        is_shared = _shared(ranges, num_new, most)
        begins = num_new.cumsum() - num_new
        mine = np.flatnonzero(is_shared)[ranges.chunks[is_shared].argsort(kind="stable")]  # ranges by chunk
        counts = num_new[ranges.sequences[mine]]
        of, nth = items_of(counts)
        of_chunks = np.bincount(ranges.chunks[mine], counts, len(ranges.table_starts)).astype(np.int64)
        num_tiles = -(-np.concatenate([num_new, of_chunks]) // size)
        owner, tile = items_of(num_tiles)
        slots = np.minimum(np.concatenate([num_new, of_chunks])[owner] - tile * size, size)
        return cls(
            slots,
            np.where(owner < len(num_new), owner, len(num_new) - 1 - owner),
            np.append(np.arange(len(first)), begins[ranges.sequences[mine]][of] + nth),
            np.append(np.zeros(len(first), np.int64), ranges.offsets[mine][of]),
            is_shared,
        )


def _shared(ranges: Ranges, num_new: Int64s, most: int) -> NDArray[np.bool_]:
    """Which ranges are read once for several sequences, with at most ``most`` queries."""
    saved = ranges.saved
    queries = np.bincount(ranges.chunks, num_new[ranges.sequences], len(saved)).astype(np.int64)
    order = (-saved).argsort(kind="stable")
    fits = np.zeros(len(saved), bool)
    fits[order] = (queries * (saved >= LEAST_SAVED))[order].cumsum() <= most
    return (fits & (saved >= LEAST_SAVED))[ranges.chunks]


def _ranges_of_tiles(
    tiles: _Tiles, ranges: Ranges, num_new: Int64s, first: Int64s, last: Int64s, window: int | None
) -> tuple[Int64s, dict[str, Int64s]]:
    """The visible part of each range of each tile: the tile of each, ascending, and its fields, as of a piece."""
    B, first_slots = len(num_new), tiles.counts.cumsum() - tiles.counts
    context = np.zeros(B, np.int64)
    np.maximum.at(context, ranges.sequences, ranges.offsets + ranges.lengths)
    # One row for each range that is read for a single sequence, one for each sequence's own tokens, one for each chunk.
    alone = np.flatnonzero(~tiles.is_shared)
    sizes = np.zeros(len(ranges.table_starts), np.int64)
    sizes[ranges.chunks] = ranges.lengths
    own, zeros = np.arange(B), np.zeros_like(sizes)
    fields_of = {
        "table": np.concatenate([ranges.table_starts[ranges.chunks[alone]], -1 - own, ranges.table_starts]),
        "turn": np.concatenate([ranges.offsets[alone], 0 * own, zeros]),
        "base": np.concatenate([ranges.offsets[alone], context, zeros]),
        "end": np.concatenate([ranges.lengths[alone], np.full(B, np.iinfo(np.int32).max), sizes]),
    }
    owners = np.concatenate([ranges.sequences[alone], own, -1 - np.arange(len(sizes))])
    by_owner = owners.argsort(kind="stable")
    left, right = (np.searchsorted(owners[by_owner], tiles.owners, side) for side in ("left", "right"))
    at, nth = items_of(right - left)
    chosen = by_owner[left[at] + nth]
    found = {name: column[chosen] for name, column in fields_of.items()}
    # The places of a tile's queries on the scale of its ranges, before the base is subtracted.
    lowest = np.minimum.reduceat(first[tiles.rows] - tiles.offsets, first_slots)[at]
    highest = np.maximum.reduceat(last[tiles.rows] - tiles.offsets, first_slots)[at]
    found["begin"] = np.zeros(len(at), np.int64)
    if window is not None:
        found["begin"] = np.maximum(lowest - found["base"] + 1 - window, 0)
    found["end"] = np.minimum(found["end"], highest - found["base"] + 1)
    is_seen = found["begin"] < found["end"]
    return at[is_seen], {name: column[is_seen] for name, column in found.items()}
