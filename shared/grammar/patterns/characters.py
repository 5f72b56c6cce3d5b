"""Sets of characters, and how they are spelled in bytes. Introduced in phase 12.

An automaton reads bytes because tokens are bytes: a token may end in the middle of a character. So a set of characters
becomes sequences of byte ranges, one for each length of UTF-8 and for each boundary in between. Inside a JSON string
some characters have another spelling.

Invariant: a set is a tuple of sorted, disjoint and non-adjacent ranges of code points, without surrogates, which no
valid UTF-8 contains.
"""

import json
from collections.abc import Iterable, Iterator
from enum import Enum

MAX_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

Range = tuple[int, int]
"""The first and the last member."""
Characters = tuple[Range, ...]
Sequence = tuple[Range, ...]
"""A range of bytes for each size."""


class Spelling(Enum):
    """How a text is written: as UTF-8, or as UTF-8 inside a JSON string."""

    UTF8 = "utf8"
    JSON = "json"


def characters(ranges: Iterable[Range]) -> Characters:
    """The set of all members of the ranges, in any order."""
    merged: list[Range] = []
    for first, last in sorted(_without_surrogates(ranges)):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _without_surrogates(ranges: Iterable[Range]) -> Iterator[Range]:
    low, high = SURROGATES
    for first, last in ranges:
        for begin, end in ((first, min(last, low - 1)), (max(first, high + 1), last)):
            if begin <= end:
                yield begin, end


def complement(members: Characters) -> Characters:
    """All other characters."""
    edges = [-1, *(edge for first, last in members for edge in (first - 1, last)), MAX_CHARACTER]
    return characters((before + 1, end) for before, end in zip(edges[::2], edges[1::2], strict=True) if before < end)


ANY = characters([(0, MAX_CHARACTER)])


def utf8(first: int, last: int) -> list[Sequence]:
    """The UTF-8 of the characters from ``first`` to ``last``, which are not surrogates, as sequences of byte ranges.

    Every combination of bytes of a sequence is a character of the range, and each character is in one sequence.
    """
    # exercise 12x1: a range of characters as ranges of bytes
    # hint: where the length of the encoding changes, cut: after 0x7F, 0x7FF and 0xFFFF, and solve each part by itself
    # hint: one character is one sequence: a range of one byte for each byte of chr(first).encode()
    # hint: the last bytes may be combined freely only if first ends in bytes 0x80 and last in bytes 0xBF
    # hint: if they do not, cut at a multiple of 64 (64 ** 2, 64 ** 3): each byte after the first holds 6 bits
    for border in (0x7F, 0x7FF, 0xFFFF):
        if first <= border < last:
            return utf8(first, border) + utf8(border + 1, last)
    low, high = chr(first).encode(), chr(last).encode()
    for length in range(1, len(low)):
        size = 64**length  # characters that differ only in the last `length` bytes
        if first // size != last // size:
            if first % size != 0:
                border = first | (size - 1)
                return utf8(first, border) + utf8(border + 1, last)
            if last % size != size - 1:
                border = last - last % size
                return utf8(first, border - 1) + utf8(border, last)
    return [tuple(zip(low, high, strict=True))]
    # end exercise


ESCAPED = characters([(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))])
"""Characters that JSON does not spell literally."""


def spelled(members: Characters, spelling: Spelling) -> list[Sequence]:
    """The bytes of the members of a set, as sequences of byte ranges. In JSON each character has one spelling, that of
    ``json.dumps(text, ensure_ascii=False)``: a key or a value that is compared byte by byte has no other form.
    """
    plain = members
    sequences: list[Sequence] = []
    if spelling is Spelling.JSON:
        plain = complement(characters((*complement(members), *ESCAPED)))
        for first, last in ESCAPED:
            for character in range(first, last + 1):
                if any(begin <= character <= end for begin, end in members):
                    sequences.append(tuple((byte, byte) for byte in json.dumps(chr(character))[1:-1].encode()))
    for first, last in plain:
        sequences += utf8(first, last)
    return sequences
