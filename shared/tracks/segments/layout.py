"""The layout of a batch in which requests are made of chunks. Introduced in phase 9.1.

A request's own tokens have their slots and block table as ever. Before them it has *ranges*: each is a chunk, at a
position of the request. The blocks of a chunk are listed once for each place that it stands in, and are shared by all.
Invariant: every range of a sequence ends before the sequence's own first token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from shared.cache.layout.paged import PagedLayout
from shared.cache.pool.blocks import Blocks
from shared.tracks.segments.registry import Chunk


class Range(NamedTuple):
    """A chunk in a sequence: its token j is the sequence's token ``offset + j``."""

    sequence: int  # index in the batch
    offset: int
    length: int  # tokens
    blocks: Blocks


def ranges_of(contexts: Iterable[tuple[Chunk, ...]]) -> tuple[Range, ...]:
    """The ranges of sequences that begin with these chunks, all of which are resident."""
    return tuple(
        Range(sequence, offset, len(chunk), chunk.blocks)
        for sequence, chunks in enumerate(contexts)
        for offset, chunk in zip(offsets_of(map(len, chunks)), chunks, strict=True)
        if chunk.blocks is not None
    )


def offsets_of(lengths: Iterable[int]) -> list[int]:
    """Where each of consecutive pieces of these lengths begins."""
    return list(accumulate(lengths, initial=0))[:-1]


@dataclass(frozen=True)
class LayoutRanges:
    """The ranges of a layout's sequences, whose attention is planned by the view; see ``LayoutExtra``."""

    ranges: tuple[Range, ...]

    def part(self, layout: PagedLayout, sequences: slice) -> PagedLayout:
        mine = [one for one in self.ranges if sequences.start <= one.sequence < sequences.stop]
        moved = tuple(one._replace(sequence=one.sequence - sequences.start) for one in mine)
        return replace(layout, extra=LayoutRanges(moved))
