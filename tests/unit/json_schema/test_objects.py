"""Schemas of objects: keys with names and patterns, how many, which need others, and alternatives of objects."""

import json
from typing import Any

import pytest

from shared.grammar.documents.json_schema import compile_schema
from tests.grammars import assert_language, budget
from tests.unit.json_schema.judged import SchemaCase, check_schema


def tagged(number: int, *keywords: str) -> dict[str, Any]:
    """An open object with a tag and a key of its own."""
    members = {"kind": {"const": f"k{number}"}, f"p{number}": {"type": "integer"}}
    return {"properties": members} | {key: list(members) for key in keywords}


CASES: dict[str, SchemaCase] = {
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
    "alternatives that see a value alike": (
        {
            "type": "object",
            "anyOf": [
                {"properties": {"t": {"const": "a"}, "v": {"type": ["string", "integer"]}}, "required": ["t"]},
                {"properties": {"t": {"const": "b"}, "v": {"type": ["string", "integer", "null"]}}, "required": ["t"]},
            ],
        },
        [{"v": v, "t": t} for v in ("x", 1) for t in "ab"] + [{"v": None, "t": "b"}],
        [{"v": None, "t": "a"}, {"v": 1, "t": "c"}, {"v": []}],
    ),
    "patterns of keys": (
        {
            "properties": {"ab": {"maximum": 9}},
            "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}},
            "additionalProperties": {"type": "null"},
        },
        [{}, {"ab": 7}, {"a": 1, "b": 5.5, "c": None}, {"xb": 5}],
        [{"ab": 3}, {"ab": 10}, {"ab": 7.5}, {"c": 1}, {"acb": 4}],
    ),
    "a lookahead in a pattern of keys": (
        {"patternProperties": {"^(?!pattern$).*$": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        [{"pattern": None}, {"patterns": 1, "a": 2, "": 3}],
        [{"pattern": 1}, {"patterns": None}, {"": None}],
    ),
    "names of keys": (
        {"propertyNames": {"pattern": "^[a-z]+$", "maxLength": 2}},
        [{}, {"a": 1, "bc": 2}],
        [{"A": 1}, {"abc": 1}],
    ),
    "numbers of keys": (
        {"properties": {"a": True, "b": True}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"b": 1, "a": 2}, {"x": 1}, {"x": 1, "a": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}, {"x": 1, "y": 2, "z": 3}],
    ),
    "as many keys as they may have": (
        {"type": "object", "required": ["a"], "minProperties": 2, "maxProperties": 2},
        [{"a": 1, "b": 2}, {"x": 1, "a": 2}],
        [{}, {"a": 1}, {"x": 1, "y": 2}, {"a": 1, "b": 2, "c": 3}],
    ),
    "required beside the most": (
        {"required": ["z"], "maxProperties": 2},
        [{"z": 1}, {"a": 1, "z": 2}],
        [{"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "z": 3}],
    ),
    "dependents": (
        {"dependentRequired": {"card": ["name", "date"]}, "properties": {"card": {"type": "integer"}}},
        [{}, {"name": 1}, {"card": 1, "date": 2, "name": 3}, {"date": 1, "x": 2, "name": 3, "card": 4}],
        [{"card": 1}, {"card": 1, "name": 2}, {"card": "x", "name": 1, "date": 2}],
    ),
    "dependents of dependents": (
        {
            "dependentRequired": {"a": ["b"], "b": ["c"], "x": ["y"], "y": ["n"]},
            "properties": {"n": False},
            "additionalProperties": {"type": "integer"},
            "type": "object",
        },
        [{}, {"c": 1}, {"b": 1, "c": 2}, {"c": 1, "a": 2, "b": 3}],
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 2}, {"x": 1}, {"x": 1, "y": 1}],
    ),
    "dependents of required keys": (
        {"dependentRequired": {"d": ["e"], "c": ["d"], "b": ["c"], "a": ["b"]}, "required": ["a"], "maxProperties": 5},
        [dict.fromkeys("abcde", 1), dict.fromkeys("edcba", 1)],
        [{"a": 1}, dict.fromkeys("abcd", 1), dict.fromkeys("abcdef", 1)],
    ),
    "dependencies": (
        {"dependencies": {"a": ["b"], "c": {"properties": {"d": {"type": "null"}}}}},
        [{"b": 1}, {"a": 1, "b": 2}, {"c": 1, "d": None}, {"d": 1}, 4],
        [{"a": 1}, {"c": 1, "d": 1}],
    ),
    "one of required": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"x": 1, "b": 2}],
        [{}, {"a": 1, "b": 2}, {"b": 1, "x": 0, "a": 2}],
    ),
    "two keys or two others": (
        {"type": "object", "anyOf": [{"required": ["a", "b"]}, {"required": ["c", "d"]}]},
        [{"a": 1, "b": 2}, {"d": 1, "c": 2}, {"a": 1, "c": 2, "b": 3}],
        [{}, {"a": 1}, {"a": 1, "c": 2}, {"d": 1, "b": 2}],
    ),
    "a dependent key or another one": (
        {"type": "object", "anyOf": [{"dependentRequired": {"x": ["y"]}}, {"required": ["c"]}]},
        [{}, {"x": 1, "y": 2}, {"c": 1, "x": 2}],
        [{"x": 1}, {"x": 1, "z": 2}],
    ),
    "one of closed": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
                {
                    "type": "object",
                    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
                    "required": ["b"],
                },
            ]
        },
        [{}, {"a": "x"}, {"b": 1}, {"b": 1, "c": 2}],
        [{"a": 1}, {"c": 1}, {"b": "x"}],
    ),
    "not": (
        {"type": "object", "not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
        [{}, {"a": 2}, {"b": 1}],
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    "if": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["x", "y"]}},
            "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
            "then": {"required": ["size"]},
            "else": {"properties": {"size": False}},
        },
        [{"kind": "x", "size": 1}, {"size": 1, "kind": "x"}, {"kind": "y"}, {}],
        [{"kind": "x"}, {"kind": "y", "size": 1}, {"size": 1}, {"kind": "z"}],
    ),
    "keys that are spelled with escapes": (
        {"properties": {'a"\n': {"type": "integer"}}, "additionalProperties": False, "required": ['a"\n']},
        [{'a"\n': 1}],
        [{"a": 1}, {"a\n": 1}],
    ),
    "names that begin with names": (
        {
            "properties": {"a": {"type": "null"}, "ab": {"type": "integer"}, "abc": {"type": "boolean"}},
            "additionalProperties": {"type": "string"},
            "required": ["ab"],
        },
        [{"ab": 1}, {"abc": True, "ab": 1, "a": None}, {"ab": 1, "abcd": "x", "": "y", "b": "z"}],
        [{"ab": "x"}, {"a": 1, "ab": 1}, {"ab": 1, "abc": "x"}, {"abc": True}, {"ab": 1, "abcd": 1}],
    ),
    "not both keys": (
        {"type": "object", "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}],
    ),
    "not both keys with these values": (
        {"type": "object", "not": {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 2}, {"a": 1, "b": 1}],
        [{"a": 1, "b": 2}, {"b": 2, "c": 3, "a": 1}],
    ),
    "not a key of any value": (
        {"type": "object", "not": {"properties": {"a": {}}, "required": ["a"]}},
        [{}],
        [{"a": 1}],
    ),
    "not with those that must come": (
        {"type": "object", "not": {"dependentRequired": {"a": ["b", "c"]}}},
        [{"a": 1}, {"a": 1, "b": 1}, {"c": 1, "a": 1}],
        [{}, {"b": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "not with what a key asks for": (
        {"type": "object", "not": {"dependencies": {"a": {"required": ["b"]}}}},
        [{"a": 1}, {"c": 1, "a": 1}],
        [{}, {"c": 1}, {"a": 1, "b": 1}],
    ),
    "some key that is not described is wrong": (
        {"properties": {"a": {"type": "string"}}, "not": {"additionalProperties": {"type": "integer"}}},
        [{"b": "x"}, {"a": "x", "b": 1, "c": None}, {"c": [1], "a": "x"}, {"b": "x", "c": "y"}, {"a": "x"}],
        [{}, {"b": 1}, {"b": 1, "c": 2}, {"a": 1, "b": "x"}, 3],
    ),
    "all that is not described is right": (
        {
            "type": "object",
            "properties": {"a": True},
            "not": {"properties": {"a": True}, "additionalProperties": False},
        },
        [{"b": 1}, {"a": 1, "c": 1}],
        [{}, {"a": 1}, 3],
    ),
    "some key of a pattern is wrong": (
        {"properties": {"x-a": True}, "not": {"patternProperties": {"^x-": {"type": "integer"}, "y$": False}}},
        [{"x-a": "x"}, {"x-a": "x", "x-b": 1}, {"x-b": 1, "a": 2, "x-c": None}, {"y": 1}, {"x-a": 1, "ay": 1}],
        [{}, {"x-a": 1}, {"a": "x"}, {"x-b": 2, "x-c": 3}, "x"],
    ),
    "exactly one map": (
        {"oneOf": [{"additionalProperties": {"type": "integer"}}, {"additionalProperties": {"type": "string"}}]}
        | {"type": "object"},
        [{"a": 1}, {"a": "x", "b": "y"}],
        [{}, {"a": None}, {"a": 1, "b": "x"}, {"a": "x", "b": 1}],
    ),
    "a map inside itself": (
        {
            "$defs": {"t": {"type": ["string", "object"], "additionalProperties": {"$ref": "#/$defs/t"}}},
            "if": {"$ref": "#/$defs/t"},
            "then": {"type": "string"},
            "else": {"type": "object"},
        },
        ["x", {"a": 1}, {"a": {"b": {"c": 1}}}, {"a": "x", "b": {"c": None}}],
        [{}, {"a": "x"}, {"a": {"b": {}}}, 3, [1]],
    ),
    "exactly one of values inside themselves": (
        {
            "$defs": {
                "v": {
                    "oneOf": [
                        {"type": "null"},
                        *(
                            {"type": "object", "properties": {"next": {"$ref": "#/$defs/v"}, key: {"type": "integer"}}}
                            | {"required": ["next"]}
                            for key in "pq"
                        ),
                    ]
                }
            },
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/v"}},
            "required": ["a"],
        },
        [{"a": None}, {"a": {"next": None, "p": "x"}}, {"a": {"next": {"q": "x", "next": None}, "p": "x"}}],
        [{"a": {"next": None}}, {"a": {"next": None, "p": 1}}, {"a": {"next": None, "p": "x", "q": "x"}}],
    ),
    "a tag of open objects": (
        {"type": "object", "oneOf": [tagged(n, "required") for n in range(12)]},
        [{"kind": "k1", "p1": 1}, {"p1": 1, "p2": "x", "kind": "k1"}, {"p11": 0, "kind": "k11", "x": 1}],
        [{"kind": "k1", "p1": "x"}, {"p1": 1, "kind": "k2"}, {"p1": 1}],
    ),
    "a tag that may be missing": (
        {"type": "object", "oneOf": [tagged(n) for n in range(8)]},
        [{"kind": "k1"}, {"p1": "x", "kind": "k2"}, {f"p{n}": "x" for n in range(7)}],
        [{}, {"kind": "k1", "p1": "x"}, {"kind": "x"}, {"p1": "x"}],
    ),
    "a value whose alternative a later key names": (
        {
            "type": "object",
            "anyOf": [
                {"properties": {"n": {"const": n}, "v": {"items": {"type": kind}, "type": "array"}}}
                for n, kind in enumerate(("string", "boolean", "null", "object", "array"))
            ],
        },
        [{"v": [value], "n": n} for n, value in enumerate(("x", True, None, {}, []))] + [{"v": [], "n": 4}],
        [{"v": [None], "n": 0}, {"v": ["x", True]}, {"v": [{}], "n": 4}],
    ),
    "twenty conditions": (
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": f"k{n}"}}, "required": ["kind"]},
                    "then": {"properties": {f"p{n}": {"type": "string"}}, "required": [f"p{n}"]},
                }
                for n in range(20)
            ],
        },
        [{}, {"kind": "k1", "p1": "x", "p2": 1}, {"p2": 1, "p19": "x", "kind": "k19"}, {"kind": "k20", "p1": 1}],
        [{"kind": "k1"}, {"p1": 1, "kind": "k1"}, {"kind": "k19", "p1": "x"}],
    ),
    "a key that some of many may have": (
        {
            "type": "object",
            "anyOf": [{"required": [f"p{n}"], "properties": {"x": n == 3}} for n in range(5)],
        },
        [{"p1": 1}, {"x": 1, "p3": 1}, {"p0": 1, "x": 1, "p3": 1}],
        [{"p0": 1, "x": 1}, {"x": 1, "p4": 1}],
    ),
    "objects that differ inside": (
        {
            "type": "object",
            "anyOf": [
                {"properties": {"a": {"properties": {"b": {"const": n}}, "type": "object"}, "n": {"const": n}}}
                | {"required": ["n"]}
                for n in range(6)
            ],
        },
        [{"n": 3, "a": {"b": 3}}, {"n": 0, "a": {}}, {"a": {"b": 0}, "n": 0}],
        [{"n": 3, "a": {"b": 2}}, {"a": {"b": 4}, "n": 3}, {"a": {}}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    check_schema(*CASES[name])


@pytest.mark.parametrize("text", ['{"b":"x","b":1}', '{"b":"x","c":"x","b":1}', '{"x-a":"x","b":"x","b":1}'])
def test_a_key_without_a_name_that_comes_again_does_not_take_back_its_wrong_value(text: str) -> None:
    """The last of equal keys counts."""
    schema = {
        "properties": {"x-a": True},
        "not": {"properties": {"x-a": True}, "additionalProperties": {"type": "integer"}},
    }
    automaton = compile_schema(schema | {"type": "object"}, budget())
    assert not automaton.accepts(text.encode())
    assert automaton.accepts(b'{"b":1,"b":"x"}')


def test_alternatives_of_open_objects_need_few_states() -> None:
    """A few for each alternative, and not twice as many."""
    sizes = [
        compile_schema({"type": "object", "anyOf": [tagged(n) for n in range(size)]}, budget()).num_states
        for size in (4, 8, 12, 24)
    ]
    assert sizes[3] - sizes[2] <= 3 * (sizes[2] - sizes[1]) + 60
    assert sizes[3] < 1500, sizes


def test_a_key_may_need_a_single_other_one_as_draft_3_has_it() -> None:
    automaton = compile_schema({"type": "object", "dependencies": {"a": "bc"}}, budget())
    assert_language(automaton, ['{"a":1,"bc":2}', '{"bc":1}'], ['{"a":1}', '{"a":1,"b":2,"c":3}'])


CLOSED: dict[str, SchemaCase] = {
    "named properties": (
        {"properties": {"a": {"properties": {"b": {}}}}, "required": ["c"]},
        [{"c": 1}, {"a": {"b": 1}, "c": 1}, 1],
        [{"c": 1, "d": 1}, {"a": {"d": 1}, "c": 1}],
    ),
    "no property is named": ({"type": "object", "required": ["a"]}, [{"a": 1, "b": 1}], [{}]),
    "others are spoken of": (
        {"type": "object", "properties": {"a": {}, "p": {"properties": {"a": {}}, "patternProperties": {"^x": {}}}}}
        | {"additionalProperties": True},
        [{"a": 1, "b": 1}, {"p": {"y": 1}}],
        [],
    ),
    "schemas of the same object": (
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {"type": "null"}}}], "type": "object"},
        [{"a": 1, "b": None}],
        [{"c": 1}, {"b": 1}],
    ),
    "alternatives": (
        {"oneOf": [{"properties": {k: {}}, "required": [k], "type": "object"} for k in "ab"]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_objects(name: str) -> None:
    schema, accepted, refused = CLOSED[name]
    automaton = compile_schema(schema, budget(), is_closed=True)
    assert_language(automaton, map(json.dumps, accepted), map(json.dumps, refused))
