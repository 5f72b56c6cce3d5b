"""What may follow the value of a key: a comma, the brace that closes, or both."""

from typing import Any

import pytest

from shared.grammar.automaton import START
from shared.grammar.json_schema import compile_schema
from tests.comparison import assert_equal
from tests.grammars import budget

TRUE = {"const": True}
CLOSED: dict[str, Any] = {"properties": {"a": TRUE, "b": TRUE}, "additionalProperties": False}
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
    schema, expected = CASES[name]
    automaton = compile_schema({"type": "object"} | schema, budget())
    for text, following in expected.items():
        now = automaton.walk(START, text.encode())
        assert now is not None, f"{text} is refused"
        found = "".join(chr(byte) for byte in b",}" if automaton.step(now, byte) is not None)
        assert_equal(found, following, f"what may follow {text}")
