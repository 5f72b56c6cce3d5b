"""What may follow the value of a key: a comma, the brace that closes, or both."""

from typing import Any

import pytest

from shared.grammar.automata.assembler import MAX_CLASSES, Assembler, Rule
from shared.grammar.automata.automaton import START
from shared.grammar.documents.clauses import _without_implied
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from tests.comparison import assert_equal
from tests.grammars import budget

TRUE = {"const": True}
CLOSED: dict[str, Any] = {"properties": {"a": TRUE, "b": TRUE}, "additionalProperties": False}
PREFIXES = {"properties": dict.fromkeys(["ab", "ac", "b"], TRUE), "additionalProperties": False}
NAMED = {"properties": {"ab": TRUE}, "propertyNames": {"pattern": "^(ab|c+)$"}, "additionalProperties": TRUE}


@pytest.mark.parametrize(
    ("schema", "text", "begun", "refused"),
    [
        (PREFIXES, '"ab": true', ["a", "ac", "b"], ["ab", "c"]),
        (PREFIXES, '"ab": true, "ac": true', ["b"], ["a"]),
        (NAMED, '"ab": true', ["c", "cc"], ["a", "b"]),
        (NAMED, '"c": true', ["a", "ab", "c"], ["b"]),
    ],
)
def test_no_key_is_begun_in_vain(schema: dict[str, Any], text: str, begun: list[str], refused: list[str]) -> None:
    automaton = compile_schema({"type": "object"} | schema, budget())
    for key in (*begun, *refused):
        assert (automaton.walk(START, f'{{{text}, "{key}'.encode()) is not None) == (key in begun), key


CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "two keys": (
        CLOSED,
        {'{"a": true': ",}", '{"b": true': ",}", '{"a": true, "b": true': "}", '{"b": true, "a": true': "}"},
    ),
    "a required key": (
        CLOSED | {"required": ["a"]},
        {'{"a": true': ",}", '{"b": true': ",", '{"b": true, "a": true': "}"},
    ),
    "other keys": (
        {"properties": {"a": TRUE}, "required": ["a"], "additionalProperties": TRUE},
        {
            '{"a": true': ",}",
            '{"c": true': ",",
            '{"a": true, "c": true': ",}",
            '{"c": true, "a": true, "d": true': ",}",
        },
    ),
    "one key": ({"properties": {"a": TRUE}, "additionalProperties": False}, {'{"a": true': "}"}),
    "at most one key": (CLOSED | {"maxProperties": 1}, {'{"a": true': "}", '{"b": true': "}"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_comma(name: str) -> None:
    check_what_follows(*CASES[name])


def test_unique_values_that_begin_alike() -> None:
    schema = {"type": "array", "items": {"enum": [1, 12]}, "uniqueItems": True}
    check_what_follows(schema, {"[1": ",]", "[12, 1": "]", "[1, 1": "", "[1, 12": "]"})


def check_what_follows(schema: dict[str, Any], expected: dict[str, str]) -> None:
    """Of a comma and the closing characters, which may follow each text."""
    automaton = compile_schema({"type": "object"} | schema, budget())
    for text, following in expected.items():
        now = automaton.walk(START, text.encode())
        assert now is not None, f"{text} is refused"
        found = "".join(chr(byte) for byte in b",}]" if automaton.step(now, byte) is not None)
        assert_equal(found, following, f"what may follow {text}")
        assert_equal(automaton.step(now, ord(" ")) is not None, found != "", f"whether a blank may follow {text}")


def test_an_exit_has_at_most_so_many_classes() -> None:
    classes = tuple(1 << number for number in range(1 + MAX_CLASSES))
    rule = Rule(Assembler(budget()))
    assert_equal(rule.leave(0, classes[1:]), 2**MAX_CLASSES - 1, "the colour with all classes")
    with pytest.raises(GrammarError, match="alive at once"):
        rule.leave(0, classes)


def test_no_value_is_begun_in_vain() -> None:
    """Of alternatives that are bits of the frame, those that are dead want nothing."""
    alternatives = [
        {"properties": {"kind": {"const": f"k{number}"}, "p": {"const": number}, f"p{number}": {"type": "integer"}}}
        for number in range(5)
    ]
    automaton = compile_schema({"type": "object", "anyOf": alternatives}, budget())
    begun = ['"kind": "k1", "p1": 1', '"kind": "k1", "p": 1', '"p2": "x", "kind": "k1"', '"p": 1, "kind": "k1"']
    refused = ['"kind": "k1", "p1": "', '"kind": "k1", "p": 2', '"p1": "x", "kind": "k1', '"p": 1, "kind": "k2']
    for text in (*begun, *refused):
        assert (automaton.walk(START, f"{{{text}".encode()) is not None) == (text in begun), text


def test_a_clause_is_dropped_only_beside_a_stronger_one() -> None:
    """One that more objects trigger, and that fewer keys satisfy: pairs of a trigger and keys, as bits."""
    assert _without_implied({(0, 0b10), (0b1, 0b110)}, budget()) == {(0, 0b10)}
    neither = {(0b1, 0b10), (0, 0b1110)}
    assert _without_implied(neither, budget()) == neither
