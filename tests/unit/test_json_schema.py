"""JSON Schema to automaton: a table of schemas, what each accepts, and what it refuses."""

import json
from typing import Any

import pytest

from shared.grammar.json_schema import compile_json, compile_schema
from shared.grammar.limits import Budget

WRITINGS: list[dict[str, Any]] = [{}, {"indent": 2}, {"separators": (",", ":")}]

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "anything": ({}, [1, None, True, [1, [{"a": "x"}]], "é\n\x7f😀", 1e-06, 1e20, -0.0, -1.5e300], []),
    "object": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 1}, {"a": 1, "b": "xyé"}, {"b": "", "a": -5}],
        [{}, {"b": "x"}, {"a": 1, "b": "abcd"}, {"a": 1.5}, {"a": 1, "c": 1}, [], None],
    ),
    "tagged": (
        {
            "type": "object",
            "anyOf": [
                {"properties": {"t": {"const": "a"}, "v": {"type": "integer"}}, "required": ["t", "v"]},
                {"properties": {"t": {"const": "b"}, "v": {"type": "string"}}, "required": ["t", "v"]},
            ],
        },
        [{"t": "a", "v": 1}, {"v": "x", "t": "b"}, {"v": 1, "t": "a", "w": []}],
        [{"t": "a", "v": "x"}, {"v": 1, "t": "b"}, {}, {"t": "c", "v": 1}],
    ),
    "recursion": (
        {
            "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "properties": {"tree": {"$ref": "#/$defs/node"}},
            "required": ["tree"],
        },
        [{"tree": []}, {"tree": [[], [[]]]}],
        [{"tree": [1]}, {}, {"tree": [[], [[{}]]]}],
    ),
}


def writings(document: Any) -> list[bytes]:
    return [json.dumps(document, ensure_ascii=False, **how).encode() for how in WRITINGS]


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    schema, valid, invalid = CASES[name]
    automaton = compile_schema(schema, Budget())
    for document in valid:
        for text in writings(document):
            assert automaton.accepts(text), text
    for document in invalid:
        for text in writings(document):
            assert not automaton.accepts(text), text


def test_json_object() -> None:
    automaton = compile_json(Budget())
    assert automaton.accepts(b'{"a": [1, {"b": null}]}')
    assert not automaton.accepts(b"[]")
