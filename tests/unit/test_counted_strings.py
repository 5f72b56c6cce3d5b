"""Strings of patterns and formats with a length, which a counter keeps where states would be many."""

import json
import random
import re

import pytest

from shared.grammar.automata.automaton import START, UNBOUNDED
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from shared.grammar.patterns.long_repeats import as_length
from tests.grammar_walks import byte_classes, random_text
from tests.grammars import budget

PATTERNS = [
    "^(a|%[0-9]{2})*$",
    "^a*b$",
    "^(é|abcdé)*(x|$)",
    "^(ab|c|ddd)*$",
    "^[a-z]([-a-zé]*[a-z])?$",
    '^("[^"]*"|\\n)*$',
    "^(a|b)*c(dd)*$",
    "^x{3}(y|zz)*$",
]
LENGTHS = [(0, 1), (0, 2), (0, 4), (0, 5), (2, 6), (1, 7), (3, 3)]


@pytest.fixture
def _always_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.grammar.documents.counted_strings.MOST_UNCOUNTED", 0)


@pytest.mark.usefixtures("_always_counted")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_lengths_beside_a_pattern(pattern: str) -> None:
    """Exactly the strings that match and are as long; each begun string can end."""
    chance, judge = random.Random(0), re.compile(pattern.replace("$", r"\Z"))
    pieces = ["a", "b", "c", "%12", "%1", "é", "x", "dd", "ab", "y", "zz", "-", '"', "\n", "abcdé"]
    for fewest, most in LENGTHS:
        schema = {"type": "string", "pattern": pattern, "minLength": fewest, "maxLength": most}
        texts = {"".join(chance.choices(pieces, k=chance.randint(0, 6))) for _ in range(300)}
        texts |= {"", "xxx", "a" * most + "b", "%12" * most, "c" * most, "xxx" + "y" * (most - 3), "é" * most}
        texts |= {text + end for text in ("a" * (most - 1), "é" * (most - 1)) for end in ("b", "c", "x", "a")}
        valid = {text for text in texts if judge.search(text) and fewest <= len(text) <= most}
        try:
            automaton = compile_schema(schema, budget())
        except GrammarError:
            assert not valid, "refused though it accepts a text"
            continue
        for text in texts:
            written = '"' + text.replace('"', '\\"').replace("\n", "\\n") + '"'
            assert automaton.accepts(written.encode()) == (text in valid), (text, fewest, most)
        classes = byte_classes(automaton)
        for _ in range(20):
            found = random_text(automaton, chance, classes).decode()
            text = json.loads(found)
            assert fewest <= len(text) <= most, found


@pytest.mark.parametrize(
    ("format_name", "text", "piece", "most"),
    [
        ("uri", "http://a/", "%20", 2048),
        ("uri-reference", "http://[::1]/", "b", 2048),
        ("email", "a@b", ".c", 320),
        ("hostname", "a", "-b", 60),
        ("iri", "http://é/", "é", 500),
    ],
)
def test_lengths_beside_a_format(format_name: str, text: str, piece: str, most: int) -> None:
    """To the last character, with few states."""
    counted = budget()
    automaton = compile_schema({"type": "string", "format": format_name, "maxLength": most}, counted)
    assert automaton.num_states < 2000
    assert counted.work < 150_000
    longest = text + piece * ((most - len(text)) // len(piece))
    filled = longest + "c" * (most - len(longest))
    assert automaton.accepts(f'"{filled}"'.encode())
    assert not automaton.accepts(f'"{filled}c"'.encode())
    assert automaton.walk(START, f'"{filled}c'.encode()) is None
    if piece == "%20":
        for left, is_room in ((2, False), (3, True)):
            begun = (text + "c" * most)[: most - left]
            assert (automaton.walk(START, f'"{begun}%'.encode()) is not None) == is_room


def test_lengths_that_differ_share_no_counter() -> None:
    lengths = [300, 301, 302, 303, 400]
    schema = {
        "type": "array",
        "prefixItems": [{"format": "uri", "type": "string", "maxLength": most} for most in lengths],
        "minItems": len(lengths),
        "items": False,
    }
    automaton = compile_schema(schema, budget())
    for more in (0, 1):
        texts = [f'"a:{"b" * (most - 2)}' for most in lengths]
        texts[3] += "b" * more
        assert automaton.accepts(("[" + '",'.join(texts) + '"]').encode()) == (more == 0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a{1,20}$", ("^a*$", 1, 20)),
        ("^[A-Z](b|c){3,20}?(dd|ee){2}$", ("^[A-Z](b|c)*(dd|ee){2}$", 8, 25)),
        ("^(?=.*b)[a-c]{16,}$", ("^(?=.*b)[a-c]*$", 16, UNBOUNDED)),
        ("^a{20}b{20}$", None),
        ("^(ab){20}$", None),
        ("^a{1,20}b?$", None),
        ("^a{1,20}(b|cc)$", None),
        ("^a{1,20}|b$", None),
        ("a{1,20}$", None),
        ("^a{1,15}$", None),
        ("^a{1,20}", None),
        ("^a{1,20}b", None),
        ("^a{1,20", None),
        ("^a{1,20}(", None),
    ],
)
def test_long_repeats_are_lengths(pattern: str, expected: tuple[str, int, int] | None) -> None:
    assert as_length(pattern, budget()) == expected
    if expected:
        shorter, fewest, most = expected
        judge, other = re.compile(pattern), re.compile(shorter)
        for text in ("a", "a" * 16, "b" * 16, "a" * 20, "a" * 21, "Abbbddee", "Acbddee", "A" + "b" * 20 + "eeee"):
            assert bool(judge.search(text)) == (bool(other.search(text)) and fewest <= len(text) <= most), text


def test_names_need_no_states_for_each_letter() -> None:
    counted = budget()
    automaton = compile_schema({"type": "string", "pattern": "^[\\p{L}\\p{M} '-]{1,100}$"}, counted)
    assert automaton.num_states < 500
    assert counted.work < 100_000
