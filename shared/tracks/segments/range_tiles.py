"""The queries of a step that attend to the same ranges of keys, on the host. Introduced in phase 9.1.

A sequence made of segments attends to ranges of keys: its segments, each with a block table and an offset in the
sequence, and its own tokens. A *tile* is a few queries that attend to the same ranges. There are two kinds. One holds
the new tokens of one sequence, with its own tokens and the segments that no other sequence reads in this step. The
other holds the queries of several sequences and a segment that they share, whose keys are thus read once for all
(FlashInfer calls this cascade attention; arXiv 2501.01005). Each query of a tile has a *slot*.

Invariants: each query has one tile with the keys of its own sequence, and one for each occurrence of a shared segment
in it; the tiles depend on the sequences, their segments and the number of their new tokens, not on positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared.attention.descriptor import Int32s
from shared.attention.plan import items_of

Int64s = NDArray[np.int64]
LEAST_SAVED = 256  # keys; a segment is shared if that saves at least this many reads, since each tile adds states
WITHOUT_END = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Ranges:
    """R ranges of the sequences of a step, those of a sequence in order; a segment has a table, in ``tables``."""

    sequences: Int64s  # [R], index in the batch
    offsets: Int64s  # [R], offset of the range in its sequence
    lengths: Int64s  # [R], in tokens
    segments: Int64s  # [R], index of the segment
    tables: Int32s  # the blocks of all segments, concatenated
    table_starts: Int64s  # [segments], in ``tables``

    @classmethod
    def of(cls, ranges: Sequence[Any]) -> Self:
        """From the fields ``sequence``, ``offset``, ``length`` and ``blocks`` of each range; equal first blocks mean
        the same segment."""
        blocks = {int(one.blocks[0]): one.blocks for one in ranges}
        number = {first: n for n, first in enumerate(blocks)}
        numbers = [(one.sequence, one.offset, one.length, number[int(one.blocks[0])]) for one in ranges]
        sizes = np.array([len(table) for table in blocks.values()], np.int64)
        sequences, offsets, lengths, segments = np.array(numbers, np.int64).reshape(-1, 4).T
        tables = np.concatenate([*blocks.values()])
        return cls(sequences, offsets, lengths, segments, tables, sizes.cumsum() - sizes)

    @cached_property
    def sizes(self) -> Int64s:
        """Tokens of each segment, ``[segments]``."""
        sizes = np.zeros(len(self.table_starts), np.int64)
        sizes[self.segments] = self.lengths
        return sizes

    @cached_property
    def saved(self) -> Int64s:
        """Keys ``[segments]`` whose reads are saved if each segment is read only once."""
        return (np.bincount(self.segments, minlength=len(self.sizes)) - 1) * self.sizes

    @property
    def is_shared(self) -> bool:
        """Whether a segment is worth reading once for several sequences."""
        return bool((self.saved >= LEAST_SAVED).any())


@dataclass(frozen=True)
class Tiles:
    """The tiles of a step, those of single sequences first, and the ranges of each tile."""

    counts: Int64s  # [tiles], slots
    rows: Int64s  # [slots], the query: a new token of the step
    offsets: Int64s  # [slots], offset of the shared segment; 0 in a tile of a single sequence
    tiles: Int64s  # [ranges], the tile of each range, ascending
    tables: Int64s  # [n], in ``Ranges.tables``; -1 - b: sequence b's own table
    turns: Int64s  # [n], the range's offset; 0 if the slots hold the offsets, or the range is the sequence's own tokens
    bases: Int64s  # [n], subtracted from a position to give the index on the range's scale, besides the slot's offset
    lengths: Int64s  # [n]; WITHOUT_END for a sequence's own tokens

    @classmethod
    def of(cls, ranges: Ranges, num_new: Int64s, tokens_per_tile: int, most_shared_slots: int) -> Self:
        """The tiles of a step.

        Args:
            num_new: ``[B]``, new tokens of each sequence, at least 1.
            most_shared_slots: segments whose queries would need more slots are read once per sequence.
        """
        B, is_shared = len(num_new), _shared(ranges, num_new, most_shared_slots)
        begins = num_new.cumsum() - num_new
        mine = np.flatnonzero(is_shared)[ranges.segments[is_shared].argsort(kind="stable")]  # ranges by segment
        counts = num_new[ranges.sequences[mine]]
        of, nth = items_of(counts)
        of_segments = np.bincount(ranges.segments[mine], counts, len(ranges.sizes)).astype(np.int64)
        queries = np.concatenate([num_new, of_segments])  # for each owner of tiles: the sequences, then the segments
        owner, tile = items_of(-(-queries // tokens_per_tile))
        # One range for each segment that a single sequence reads, one for each sequence's own tokens, and one for each
        # shared segment.
        alone, own, segments = np.flatnonzero(~is_shared), np.arange(B), np.arange(len(ranges.sizes))
        context = np.zeros(B, np.int64)
        np.maximum.at(context, ranges.sequences, ranges.offsets + ranges.lengths)
        owners = np.concatenate([ranges.sequences[alone], own, B + segments])
        by_owner = owners.argsort(kind="stable")
        left, right = (np.searchsorted(owners[by_owner], owner, side) for side in ("left", "right"))
        at, nth_range = items_of(right - left)
        chosen = by_owner[left[at] + nth_range]
        return cls(
            np.minimum(queries[owner] - tile * tokens_per_tile, tokens_per_tile),
            np.append(np.arange(num_new.sum()), begins[ranges.sequences[mine]][of] + nth),
            np.append(np.zeros(num_new.sum(), np.int64), ranges.offsets[mine][of]),
            at,
            np.concatenate([ranges.table_starts[ranges.segments[alone]], -1 - own, ranges.table_starts])[chosen],
            np.concatenate([ranges.offsets[alone], 0 * own, 0 * segments])[chosen],
            np.concatenate([ranges.offsets[alone], context, 0 * segments])[chosen],
            np.concatenate([ranges.lengths[alone], np.full(B, WITHOUT_END), ranges.sizes])[chosen],
        )

    @cached_property
    def first_slots(self) -> Int64s:
        """The first slot of each tile."""
        return self.counts.cumsum() - self.counts

    @cached_property
    def by_row(self) -> Int64s:
        """The slots in the order of their queries."""
        return self.rows.argsort(kind="stable")


def _shared(ranges: Ranges, num_new: Int64s, most: int) -> NDArray[np.bool_]:
    """Which ranges are read once for several sequences, with at most ``most`` queries."""
    is_worth = ranges.saved >= LEAST_SAVED
    queries = np.bincount(ranges.segments, num_new[ranges.sequences], len(is_worth)).astype(np.int64)
    order = (-ranges.saved).argsort(kind="stable")
    fits = np.zeros(len(is_worth), bool)
    fits[order] = (queries * is_worth)[order].cumsum() <= most
    return (fits & is_worth)[ranges.segments]
