"""Where the tokens of a batch stand in memory, as numpy arrays. Introduced in phase 4.

A pool works it out on the host, once a step; a view only loads it. The arrays are enough: they can be sent to another
process that has no pool. Positions belong to requests (logical), lengths to the pool (physical): neither is derived
from the other. Invariants: arrays hold plain numbers; the sequences stand in the order of the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from shared.errors import CapacityError
from shared.scheduling.schedule import Integers, Schedule


@dataclass(frozen=True)
class Layout:
    """The places of T new tokens of B sequences."""

    rows: Integers  # [B], a number below the most sequences there can be, the request's own for as long as it runs
    num_cached: Integers  # [B], tokens of each that stand in memory before the step, those in flight included
    lengths: Integers  # [B], with the new ones
    slot_mapping: Integers  # [T], the slot of each new token: its number when all memory of a layer lies end to end

    def part(self, sequences: slice, tokens: slice) -> Self:
        """The layout of some neighbouring sequences, and their new tokens."""
        return type(self)(
            self.rows[sequences], self.num_cached[sequences], self.lengths[sequences], self.slot_mapping[tokens]
        )


def ranges(first: Integers, counts: Integers) -> Integers:
    """``first[b], first[b] + 1, …``, ``counts[b]`` numbers for each b, laid end to end."""
    if (counts == 1).all():
        return first
    ends: Integers = counts.cumsum()
    numbers: Integers = (first - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers


def before_and_after(
    schedule: Schedule, rows: Sequence[int], lengths: Sequence[int], granted: Sequence[int]
) -> tuple[Integers, Integers]:
    """``[B]`` each, how many tokens of each sequence stand in memory before the step, and after it.

    Args:
        rows: the row of each request.
        lengths, granted: of each row, the tokens that were committed, and for how many there is memory.

    Raises CapacityError for a step that would write tokens for which no memory was granted.
    """
    before = np.array(  # what was committed, and what is in flight
        [
            lengths[row] + entry.start - entry.request.num_computed_tokens
            for row, entry in zip(rows, schedule, strict=True)
        ],
        np.int64,
    )
    after = before + schedule.num_tokens
    room = np.array([granted[row] for row in rows], np.int64)
    if (after > room).any():
        raise CapacityError(f"The step would fill {after.tolist()} tokens of {room.tolist()} that were granted.")
    return before, after
