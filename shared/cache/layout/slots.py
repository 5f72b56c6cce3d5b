"""The KV cache slots of a batch, as numpy arrays. Introduced in phase 4.

The pool computes a layout on the host, once a step; a view uploads it. The arrays are self-contained, so they can be
sent to another process that has no pool. Positions belong to requests (logical), lengths to the pool (physical):
neither is derived from the other. Invariant: the sequences are in the order of the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from shared.errors import CapacityError
from shared.scheduling.schedule import Integers, Schedule


@dataclass(frozen=True)
class Layout:
    """The slots of T new tokens of B sequences."""

    rows: Integers  # [B], the row of each request, below max_sequences; constant while the request runs
    num_cached: Integers  # [B], tokens of each sequence in the cache before the step, tokens in flight included
    lengths: Integers  # [B], num_cached plus the new tokens
    slot_mapping: Integers  # [T], the slot of each new token: its index among all slots of a layer
    num_ahead: int = field(default=0, kw_only=True)  # further tokens that may follow without a new layout

    @cached_property
    def num_new(self) -> Integers:
        """The new tokens of each sequence, ``[B]``."""
        return self.lengths - self.num_cached

    @cached_property
    def num_decoding(self) -> int:
        """The number of leading sequences that have one new token each; their attention has a separate kernel."""
        is_one = self.num_new == 1
        return len(is_one) if is_one.all() else int(is_one.argmin())

    def part(self, sequences: slice, tokens: slice) -> "Layout":
        """The layout of a contiguous range of sequences and their new tokens."""
        return Layout(
            self.rows[sequences], self.num_cached[sequences], self.lengths[sequences], self.slot_mapping[tokens]
        )


def ranges(first: Integers, counts: Integers) -> Integers:
    """Concatenates ``range(first[b], first[b] + counts[b])`` for all b."""
    if (counts == 1).all():
        return first
    owners, offsets = _cut(counts.tobytes(), counts.dtype.char)
    numbers: Integers = first[owners] + offsets
    return numbers


@lru_cache(maxsize=16)
def _cut(counts: bytes, dtype: str) -> tuple[Integers, Integers]:
    """The range of each number, and its index in that range; a step's counts are mostly the same as the previous
    step's."""
    lengths = np.frombuffer(counts, dtype)
    owners = np.arange(len(lengths)).repeat(lengths)
    return owners, np.arange(len(owners)) - (lengths.cumsum() - lengths)[owners]


def before_and_after(
    schedule: Schedule, rows: Sequence[int], lengths: Sequence[int], granted: Sequence[int]
) -> tuple[Integers, Integers]:
    """The tokens of each sequence in the cache before and after the step, ``[B]`` each.

    ``lengths``, ``granted``: committed and reserved tokens of each row. Raises CapacityError if too few are reserved.
    """
    committed = np.array([lengths[row] for row in rows], np.int64)
    num_computed = np.array([request.num_computed_tokens for request in schedule.requests], np.int64)
    before = committed + schedule.starts - num_computed  # including the tokens in flight
    after = before + schedule.num_tokens
    reserved = np.array([granted[row] for row in rows], np.int64)
    if (after > reserved).any():
        raise CapacityError(f"The step would write up to {after.tolist()} tokens and {reserved.tolist()} are reserved.")
    return before, after
