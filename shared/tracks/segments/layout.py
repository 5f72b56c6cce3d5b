"""The layout of a batch in which requests are made of segments. Introduced in phase 9.1.

A request's own tokens have slots and a block table, as in phase 6. They are preceded by *ranges*: each is a segment at
a position in the request. A segment's blocks are listed once for each of its positions and are shared by all.
Invariant: every range of a sequence ends before the sequence's own first token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from shared.cache.layout.paged import PagedLayout
from shared.cache.pool.blocks import Blocks
from shared.tracks.segments.registry import Segment


class Range(NamedTuple):
    """A segment in a sequence: its token j is the sequence's token ``offset + j``."""

    sequence: int  # index in the batch
    offset: int
    length: int  # tokens
    blocks: Blocks


def ranges_of(contexts: Iterable[tuple[Segment, ...]]) -> tuple[Range, ...]:
    """The ranges of sequences that begin with these resident segments."""
    return tuple(
        Range(sequence, offset, len(segment), segment.blocks)
        for sequence, segments in enumerate(contexts)
        for offset, segment in zip(offsets_of(map(len, segments)), segments, strict=True)
        if segment.blocks is not None
    )


def offsets_of(lengths: Iterable[int]) -> list[int]:
    """Where each of several consecutive pieces with these lengths begins."""
    return list(accumulate(lengths, initial=0))[:-1]


@dataclass(frozen=True)
class LayoutRanges:
    """The ranges of a layout's sequences, whose attention is planned by the view; see ``LayoutExtra``."""

    ranges: tuple[Range, ...]

    def part(self, layout: PagedLayout, sequences: slice) -> PagedLayout:
        mine = [one for one in self.ranges if sequences.start <= one.sequence < sequences.stop]
        moved = tuple(one._replace(sequence=one.sequence - sequences.start) for one in mine)
        return replace(layout, extra=LayoutRanges(moved))
