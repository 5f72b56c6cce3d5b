"""Sets of characters, and their bytes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.grammar.patterns.characters import ANY, Sequence, Spelling, characters, complement, spelled, utf8
from tests.comparison import assert_equal

CHARACTER = st.characters(codec="utf-8").map(ord)


def contains(sequence: Sequence, text: bytes) -> bool:
    return len(sequence) == len(text) and all(
        low <= byte <= high for byte, (low, high) in zip(text, sequence, strict=True)
    )


def size(sequence: Sequence) -> int:
    count = 1
    for low, high in sequence:
        count *= high - low + 1
    return count


EXAMPLES = {
    "letters": ((0x61, 0x7A), [((0x61, 0x7A),)]),
    "one of two bytes": ((0xE9, 0xE9), [((0xC3, 0xC3), (0xA9, 0xA9))]),
    "the last of a length": ((0x7F, 0x85), [((0x7F, 0x7F),), ((0xC2, 0xC2), (0x80, 0x85))]),
    "two lengths": ((0x70, 0x85), [((0x70, 0x7F),), ((0xC2, 0xC2), (0x80, 0x85))]),
    "a whole lead byte": ((0xC0, 0xFF), [((0xC3, 0xC3), (0x80, 0xBF))]),
    "from the middle": ((0xE9, 0x13F), [((0xC3, 0xC3), (0xA9, 0xBF)), ((0xC4, 0xC4), (0x80, 0xBF))]),
    "into the middle": ((0xC0, 0x101), [((0xC3, 0xC3), (0x80, 0xBF)), ((0xC4, 0xC4), (0x80, 0x81))]),
    "three bytes": ((0x800, 0xFFF), [((0xE0, 0xE0), (0xA0, 0xBF), (0x80, 0xBF))]),
    "four bytes": ((0x10FFFF, 0x10FFFF), [((0xF4, 0xF4), (0x8F, 0x8F), (0xBF, 0xBF), (0xBF, 0xBF))]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_ranges_of_bytes(name: str) -> None:
    (first, last), expected = EXAMPLES[name]
    assert_equal(sorted(utf8(first, last)), expected, f"the bytes of {first:#x} to {last:#x}", ("sequence", "byte"))


@settings(max_examples=40)
@given(st.tuples(CHARACTER, CHARACTER).map(sorted))
def test_every_character_of_a_range_is_in_one_sequence(ends: list[int]) -> None:
    for first, last in characters([(ends[0], ends[1])]):
        found = utf8(first, last)
        assert sum(map(size, found)) == last - first + 1, "as many texts as characters"
        for member in {first, last, (first + last) // 2}:
            count = sum(contains(sequence, chr(member).encode()) for sequence in found)
            assert count == 1, f"U+{member:04X} is in {count} of the sequences of U+{first:04X} to U+{last:04X}"


def test_no_other_bytes_are_characters() -> None:
    for wrong in (b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xff"):
        assert not any(contains(sequence, wrong) for spelling in Spelling for sequence in spelled(ANY, spelling)), wrong


def test_sets() -> None:
    assert characters([(5, 9), (1, 3), (4, 4), (20, 20)]) == ((1, 9), (20, 20))
    assert characters([(1, 9), (2, 3), (4, 11), (5, 6)]) == ((1, 11),)
    assert complement(ANY) == ()
    assert complement(()) == ANY
    assert characters([(0xD000, 0xE000)]) == ((0xD000, 0xD7FF), (0xE000, 0xE000))


@given(st.lists(st.tuples(CHARACTER, CHARACTER).map(lambda ends: (min(ends), max(ends))), max_size=5))
def test_a_complement_of_a_complement(ranges: list[tuple[int, int]]) -> None:
    members = characters(ranges)
    assert complement(complement(members)) == members


def test_json_spells_every_character_once() -> None:
    found = spelled(ANY, Spelling.JSON)
    for member in [*range(0x100), 0x2028, 0xFFFF, 0x10FFFF]:
        text = json.dumps(chr(member), ensure_ascii=False)[1:-1].encode()
        assert sum(contains(sequence, text) for sequence in found) == 1, hex(member)
    for wrong in (b'"', b"\\", b"\n", b"\\u0061", b"\\/", b"\\u000A", b"\\u000a"):
        assert not any(contains(sequence, wrong) for sequence in found), wrong
