"""Plans attention over several ranges of keys, on the host. Introduced in phase 9.1.

The ranges of a tile (:mod:`shared.tracks.segments.range_tiles`) are laid end to end and divided into splits of one
size, as in phase 6.1: an *item* is a tile and a split. Its keys are *pieces* of ranges. A query that is in several
tiles, or whose tile has several splits, has a state for each; they merge as in phase 6.1.

Invariants: each query attends to each of its visible keys in exactly one item. A plan is valid while positions are
within the intervals that it was made for. Decode steps plan for intervals of ``SLACK`` positions, so most of them need
no new plan.
"""

from dataclasses import astuple, dataclass, fields
from typing import Generic, Self, TypeVar

import numpy as np
from torch import Tensor

from shared.attention.descriptor import Grid, Int32s
from shared.attention.plan import choose_split, items_of, state_offsets
from shared.tracks.segments.range_tiles import Int64s, Tiles

Array = TypeVar("Array", Int32s, Tensor)
SLACK = 256  # positions


@dataclass(frozen=True)
class RangePlan(Generic[Array]):
    """A plan, on the host or on the device.

    A slot's query, at ``position``, sees the keys of a piece whose index in the range is at most ``position - base -
    offset``, where ``base`` is the piece's and ``offset`` the slot's. Before that, the query is moved back by ``turn +
    offset`` positions.
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
        """For steps of ``rows`` new tokens: three shared segments for each, on average, and eight pieces per tile."""
        slots = 4 * rows + 64
        return cls(
            rows, slots, grid.resident + slots, 8 * (grid.resident + slots), max_states(slots, grid, tokens_per_tile)
        )

    def __or__(self, other: Self) -> Self:
        """The limits for plans of either kind."""
        return type(self)(*map(max, astuple(self), astuple(other)))

    def hold(self, plan: RangePlan[Int32s]) -> bool:
        """Whether a plan fits within these sizes."""
        sizes = (len(plan.output_indptr) - 1, len(plan.slot_rows), len(plan.item_slots), len(plan.piece_tables))
        return all(size <= most for size, most in zip((*sizes, plan.num_states), astuple(self), strict=True))


def max_states(slots: int, grid: Grid, tokens_per_tile: int) -> int:
    """Maximum number of states: one for each slot, plus those of tiles with several splits (``Grid.max_states``)."""
    return slots + grid.max_states(tokens_per_tile)


def plan_ranges(
    tiles: Tiles, first: Int64s, last: Int64s, grid: Grid, *, num_rows: int, window: int | None = None
) -> RangePlan[Int32s]:
    """Plan a step.

    Args:
        first, last: ``[T]``, the smallest and largest position that each new token may have when the plan is used.
        num_rows: T, or the rows of a captured launch.
        window: queries attend to the last ``window`` positions only.
    """
    # The visible part of each range of each tile.
    lowest = np.minimum.reduceat(first[tiles.rows] - tiles.offsets, tiles.first_slots)[tiles.tiles] - tiles.bases
    highest = np.maximum.reduceat(last[tiles.rows] - tiles.offsets, tiles.first_slots)[tiles.tiles] - tiles.bases
    begins = np.zeros_like(lowest) if window is None else np.maximum(lowest + 1 - window, 0)
    ends = np.minimum(tiles.lengths, highest + 1)
    # A tile's ranges are laid end to end, in units of the kernel's key tile, after all splits of the earlier tiles.
    units = np.maximum(-(-(ends - begins) // grid.unit), 0)
    of_tiles = np.bincount(tiles.tiles, units, len(tiles.counts)).astype(np.int64)
    split = choose_split(of_tiles[of_tiles > 0], grid)
    num_splits = -(-of_tiles // split)
    item_tiles, item_splits = items_of(num_splits)
    shift = (num_splits.cumsum() - num_splits) * split - (of_tiles.cumsum() - of_tiles)
    starts = units.cumsum() - units + shift[tiles.tiles]
    # A range contributes a piece to each split that it overlaps.
    of, nth = items_of(np.where(units > 0, (starts + units - 1) // split - starts // split + 1, 0))
    items = starts[of] // split + nth
    piece_starts = np.maximum(items * split - starts[of], 0)
    piece_ends = np.minimum((items + 1) * split - starts[of], units[of])
    # The states of each query are consecutive; a query of a single item has none.
    slot_splits = num_splits.repeat(tiles.counts)
    of_rows = np.bincount(tiles.rows, slot_splits, len(first)).astype(np.int64)
    is_part = (of_rows > 1)[tiles.rows]
    counted = (slot_splits * is_part)[tiles.by_row]
    states = np.empty_like(slot_splits)
    states[tiles.by_row] = counted.cumsum() - counted
    found = (
        [len(item_tiles)],
        tiles.first_slots[item_tiles],
        tiles.counts[item_tiles],
        item_splits,
        np.append(0, np.bincount(items, minlength=len(item_tiles)).cumsum()),
        tiles.tables[of],
        tiles.turns[of],
        tiles.bases[of],
        begins[of] + piece_starts * grid.unit,
        np.minimum(begins[of] + piece_ends * grid.unit, ends[of]),
        tiles.rows,
        tiles.offsets,
        np.where(is_part, states, -1),
        state_offsets(of_rows, num_rows),
    )
    return RangePlan(*(np.asarray(array, np.int32) for array in found))
