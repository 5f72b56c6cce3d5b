"""Schemas that combine others: all, any, one or none of them, and conditions."""

import pytest

from tests.unit.json_schema.judged import SchemaCase, check_schema

CASES: dict[str, SchemaCase] = {
    "all of": (
        {
            "allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"maximum": 3}}, "required": ["a"]}],
            "type": "object",
        },
        [{"a": 2}, {"a": 3, "b": 0}, {"a": "x"}],
        [{"a": 4}, {"a": 0}, {}],
    ),
    "one of overlaps": ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, 0], [3, 1.5, 2, 4]),
    "one of three": (
        {"oneOf": [{"enum": [1, 2, 4]}, {"enum": [2, 3, 5]}, {"enum": [3, 1, 6]}]},
        [4, 5, 6],
        [1, 2, 3, 7],
    ),
    "not one of three": (
        {"enum": [1, 2, 4, 6, 7], "not": {"oneOf": [{"enum": [1, 2, 4]}, {"enum": [2, 3, 5]}, {"enum": [3, 1, 6]}]}},
        [1, 2, 7],
        [4, 6],
    ),
    "one of alternatives with alternatives": (
        {"oneOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"minimum": 2, "type": "integer"}]},
        [1, "x"],
        [3, None],
    ),
    "not a part of itself": (
        {
            "$defs": {"s": {"type": "string"}},
            "not": {"$ref": "#/$defs/s"},
            "anyOf": [{"$ref": "#/$defs/s"}, {"const": 1}],
        },
        [1],
        ["x", "", 2],
    ),
    "not a condition": (
        {"not": {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}},
        [1, None],
        [3, "x"],
    ),
    "else alone": ({"if": {"type": "integer"}, "else": {"type": "string"}}, [1, "x"], [None, 1.5]),
    "not false": ({"not": False}, [1, {}], []),
    "none of several": ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, [1, 2.5], ["x", 4, None]),
    "alternatives that exclude objects alone": (
        {
            "type": ["object", "array"],
            "properties": {"a": {"const": 1}},
            "required": ["a"],
            "anyOf": [{"properties": {"a": {"const": 2}}}, {"type": "object", "minProperties": 3}],
            "allOf": [{"anyOf": [{"maxItems": 1}, {"minItems": 3}]}],
        },
        [[], [1, 2, 3], {"a": 1, "b": 2, "c": 3}],
        [[1, 2], {"a": 1}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    check_schema(*CASES[name])
