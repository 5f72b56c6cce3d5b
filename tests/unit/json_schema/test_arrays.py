"""Schemas of arrays: their items, first items, lengths, and items that must differ."""

import pytest

from shared.grammar.automata.automaton import MAX_DEPTH, START
from shared.grammar.documents.json_schema import compile_schema
from tests.grammars import budget
from tests.unit.json_schema.judged import SchemaCase, check_schema

CASES: dict[str, SchemaCase] = {
    "some item is wrong": (
        {"type": "array", "not": {"items": {"required": ["c"]}}},
        [[{}], [{"c": 1}, {}]],
        [[], [{"c": 1}], [1]],
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
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
        [[], [1], [1, "a"], [1, "a", None, None]],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    "old tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"type": "integer"}],
            "additionalItems": False,
            "uniqueItems": False,
        },
        [[], [1]],
        [[1, 2], ["a"]],
    ),
    "old array with the keyword of a new tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "prefixItems": [{"type": "string"}],
            "items": {"type": "integer"},
        },
        [[], [1, 2]],
        [["a"], ["a", 1]],
    ),
    "lengths of arrays": (
        {"items": {"type": "array"}, "minItems": 1, "maxItems": 2},
        [[[]], [[], [1]]],
        [[], [[], [], []], [1]],
    ),
    "two tuples": (
        {
            "allOf": [
                {"prefixItems": [True, {"minLength": 2}]},
                {"prefixItems": [{"const": 1}], "items": {"type": "string"}},
            ]
        },
        [[1, "ab", "x"]],
        [[1, 2], [1, "a"], [2, "ab"]],
    ),
    "not a tuple": (
        {"type": "array", "not": {"prefixItems": [{"type": "integer"}, {"type": "string"}]}},
        [["x"], [1, 2], ["x", "y"]],
        [[], [1], [1, "x"]],
    ),
    "not a list": ({"type": "array", "not": {"enum": [[1], [2], 3]}, "maxItems": 1}, [[], [3]], [[1], [2]]),
    "one of alternatives of which one is not known yet": (
        {"oneOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "array", "maxItems": 1}]},
        [[], [1], [[], []]],
        [[[]], 3, [1, 2]],
    ),
    "an item that decides how deep the next one is": (
        {
            "type": "array",
            "anyOf": [
                {
                    "prefixItems": [{"type": "string", "pattern": "^x"}, {"const": [[[]]]}],
                    "minItems": 2,
                    "items": False,
                },
                {"prefixItems": [{"type": "string", "pattern": "^y"}], "minItems": 1, "items": False},
            ],
        },
        [["x", [[[]]]], ["y"]],
        [["x"], ["y", [[[]]]]],
    ),
    "unique listed items": (
        {"items": {"enum": ["a", "ab", 1, 12, 1.5, None, True]}, "uniqueItems": True, "maxItems": 3},
        [[], ["a", "ab", 1], [12, 1, 1.5], [True, None, 1]],
        [["a", "a"], [1, 12, 1], [None, None], ["a", "ab", 1, 12]],
    ),
    "unique texts": (
        {"items": {"type": ["string", "boolean"]}, "uniqueItems": True, "minItems": 1},
        [["pear", "apple", True, "x", ""], [False, True]],
        [["pear", "x", "pear"], [True, True], ["", ""], []],
    ),
    "unique items of which nothing is remembered": (
        {
            "type": "array",
            "items": {"type": ["object", "number", "string", "null"]},
            "uniqueItems": True,
            "minItems": 2,
        },
        [["a", "b"], ["a", {"a": [1, 1]}], [{}, None, 1.5, "x"], [1, {}], [{"a": {}}, "x", "y"]],
        [
            ["a", "a"],
            [{}],
            [{}, {}],
            [1, 1],
            [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
            [1, 1.0],
            [None, {}, None],
            [{}, []],
        ],
    ),
    "at most so many unique items": (
        {"items": {"type": ["object", "array", "string"]}, "uniqueItems": True, "maxItems": 2},
        [[], [{}, []], [[1, 1], "a"], ["a", "b"]],
        [[{}, [], "a"], ["a", "b", "c"], ["a", "a"], [[], []], [1]],
    ),
    "unique listed texts beside longer ones": (
        {
            "items": {"anyOf": [{"enum": ["a", "b"]}, {"type": "string", "minLength": 3}]},
            "uniqueItems": True,
            "type": "array",
        },
        [["a", "abc", "b"], ["xyz"]],
        [["a", "a"], ["ab"], ["xyz", "xyz"]],
    ),
    "unique items beside any": (
        {"anyOf": [{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, {"maxItems": 1}]},
        [[3], [1]],
        [[1, 1], [3, 4]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    check_schema(*CASES[name])


def test_an_array_that_still_needs_an_object_has_room_for_it() -> None:
    items = {"anyOf": [{"type": "object", "maxProperties": 0}, {"const": "x"}]}
    unique = {"type": "array", "items": items, "uniqueItems": True, "minItems": 2}
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    automaton = compile_schema({"$defs": {"n": {"anyOf": [nested, unique]}}, "$ref": "#/$defs/n"}, budget())
    depth = MAX_DEPTH - 2
    assert automaton.accepts(b'{"a":' * depth + b'["x",{}]' + b"}" * depth)
    assert automaton.walk(START, b'{"a":' * (depth + 1)) is None
