"""JSON Schema to automaton: a table of schemas, what each accepts, and what it refuses."""

import json
import math
from typing import Any

import jsonschema_rs
import pytest

from shared.grammar.automata.automaton import MAX_DEPTH, START
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from tests.grammars import assert_language, budget

WRITINGS: list[dict[str, Any]] = [{}, {"indent": 2}, {"separators": (",", ":")}]

PARTS = {"parts": {"a": {"items": {"$ref": "#/parts/b"}}, "b": {"type": "null"}}}
SCOPES = {
    "$id": "http://a/",
    "$ref": "#/$defs/inner",
    "$defs": {
        "x": {"type": "string"},
        "inner": {
            "$id": "http://a/inner",
            "type": "object",
            "$defs": {"x": {"type": "integer"}},
            "properties": {"v": {"$ref": "#/$defs/x"}},
        },
    },
}


def tagged(number: int, *keywords: str) -> dict[str, Any]:
    """An open object with a tag and a key of its own."""
    members = {"kind": {"const": f"k{number}"}, f"p{number}": {"type": "integer"}}
    return {"properties": members} | {key: list(members) for key in keywords}


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
    "some item is wrong": (
        {"type": "array", "not": {"items": {"required": ["c"]}}},
        [[{}], [{"c": 1}, {}]],
        [[], [{"c": 1}], [1]],
    ),
    "patterns that contradict each other": (
        {"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}], "maxLength": 5, "type": ["string", "null"]},
        [None],
        ["a", "b"],
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
    "false": ({"properties": {"a": False}}, [{}, {"b": 1}, 3], [{"a": 1}]),
    "types": ({"type": ["integer", "null"]}, [1, None, 0, -7], [1.5, "1", True, []]),
    "integers": (
        {"type": "integer", "minimum": -12, "exclusiveMaximum": 120},
        [-12, 0, 9, 99, 119],
        [-13, 120, 121, 1000, -100, 1.5],
    ),
    "numbers": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.25},
        [1e-06, 0.5, 1.25, 1, 1.2499, 3e-300],
        [0, -0.0, -1, 1.251, 1.3, 2, 1e20, -1e-06],
    ),
    "large numbers": ({"minimum": 1000}, [1000, 1e22, 12345.5, 10**30], [999, 999.99, 1e-06, -1e22]),
    "multiples": ({"multipleOf": 6, "minimum": 10}, [12, 600, 18], [6, 13, 20, 12.5, -12]),
    "multiples of a fraction": (
        {"multipleOf": 0.01, "minimum": 0, "exclusiveMaximum": 20},
        [19.99, 0, 0.07, 1.1, 12],
        [19.995, 20, -0.01, 20.01, 0.001],
    ),
    "multiples of a fraction that are not whole": (
        {"multipleOf": 2.5, "not": {"type": "integer"}, "type": "number"},
        [2.5, -12.5],
        [5, 1.5, 0],
    ),
    "multiples of two fractions": ({"allOf": [{"multipleOf": 0.4}, {"multipleOf": 0.06}]}, [1.2, 12, -2.4], [0.4, 0.6]),
    "whole multiples of a fraction": ({"type": "integer", "multipleOf": 1.5}, [3, 900], [1, 1.5, 4.5]),
    "old bounds": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True},
        [2, 1.5],
        [1, 0],
    ),
    "string": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ["ab", "é😀", '\n\t"', "\\//"],
        ["a", "abcd", "", 12],
    ),
    "pattern": ({"pattern": "^[a-c]+$|x"}, ["abc", "zxz", 3], ["", "abd", "y"]),
    "pattern and length": ({"type": "string", "pattern": "b", "maxLength": 3}, ["b", "abé"], ["", "aaab", "aa"]),
    "a pattern that counts letters": (
        {"type": "string", "pattern": "^[\\p{L} '-]{2,50}$"},
        ["Zoë", "Ab" * 25, "é-"],
        ["a", "Ab" * 25 + "c", "a1"],
    ),
    "a pattern that counts between others": (
        {"type": "string", "pattern": "^(?=.*7)(AB|CD)[a-z7]{3,20}?(-|é)x{2}$", "maxLength": 12},
        ["ABab7-xx", "CD7aaaaaaéxx"],
        ["AB7a-xx", "ABabc-xx", "CD7aaaaaaaéxx"],
    ),
    "not a pattern that counts": (
        {"type": "string", "not": {"pattern": "^a{2,20}$"}},
        ["a", "a" * 21, "ab"],
        ["aa", "a" * 20],
    ),
    "not pattern": ({"type": "string", "not": {"pattern": "^a"}}, ["", "ba"], ["a", "ab"]),
    "format": (
        {"type": "string", "format": "date"},
        ["2024-02-29", "1999-12-31"],
        ["2023-02-29", "1999-13-01", "2024-1-1", ""],
    ),
    "unknown format": ({"type": "string", "format": "colour"}, ["", "red"], [1]),
    "enum": (
        {"enum": [1, "a", None, [1], {"k": [True]}]},
        [1, "a", None, [1], {"k": [True]}],
        [2, True, [], [1, 1], {}, "b"],
    ),
    "numbers that begin alike": ({"enum": [1, 10, 100, 12.5]}, [1, 10, 100, 12.5], [0, 101, 12, 1000]),
    "enum and its neighbours": (
        {"enum": ["a", "abc", 5, 50], "maxLength": 2, "maximum": 9},
        ["a", 5],
        ["abc", 50, "b"],
    ),
    "const": (
        {"const": {"a": 1.5, "b": []}},
        [{"a": 1.5, "b": []}, {"b": [], "a": 1.5}],
        [{"a": 1.5}, {"a": 1, "b": []}],
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
    "a lookahead at each character": (
        {"allOf": [{"pattern": "^((?!mode)(?!Mode).)*$"}, {"pattern": "^(?=.*[0-9])(?=.*é)"}]},
        ["mod1é", "é mo de 2"],
        ["a1émode", "é", "1", "Mode1é"],
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
    "all of": (
        {
            "allOf": [{"properties": {"a": {"minimum": 1}}}, {"properties": {"a": {"maximum": 3}}, "required": ["a"]}],
            "type": "object",
        },
        [{"a": 2}, {"a": 3, "b": 0}, {"a": "x"}],
        [{"a": 4}, {"a": 0}, {}],
    ),
    "one of overlaps": ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, 0], [3, 1.5, 2, 4]),
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
    "not a part of itself": (
        {
            "$defs": {"s": {"type": "string"}},
            "not": {"$ref": "#/$defs/s"},
            "anyOf": [{"$ref": "#/$defs/s"}, {"const": 1}],
        },
        [1],
        ["x", "", 2],
    ),
    "true is not 1": ({"enum": [True, 0]}, [True, 0], [1, False]),
    "in both lists": ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["b"], ["a", "c"]),
    "listed beside what excludes": (
        {"enum": ["a", "ab", "b"], "not": {"enum": ["a"]}, "pattern": "^a"},
        ["ab"],
        ["a", "b"],
    ),
    "no integer": ({"not": {"type": "integer"}}, [1.5, "x", None], [1, -3]),
    "integers and numbers": ({"type": ["integer", "number"]}, [1, 1.5], ["x"]),
    "written numbers": ({"minimum": 0.1}, [0.1, 1], [0.09, -1]),
    "from a fraction on": ({"minimum": 1.25}, [1.25, 1.3, 2, 1.251], [1, 1.2, 1.249, -2]),
    "below a fraction": ({"exclusiveMaximum": 1.25, "type": "number"}, [1, 1.2, 1.249, -2], [1.25, 1.3, 2]),
    "one of alternatives of which one is not known yet": (
        {"oneOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "array", "maxItems": 1}]},
        [[], [1], [[], []]],
        [[[]], 3, [1, 2]],
    ),
    "the tighter lengths": (
        {"allOf": [{"minLength": 2, "maxLength": 3}, {"minLength": 1, "maxLength": 5}], "type": "string"},
        ["ab", "abc"],
        ["a", "abcd"],
    ),
    "the tighter bounds": (
        {
            "allOf": [{"minimum": 5, "maximum": 7}, {"minimum": 3, "exclusiveMaximum": 7}, {"maximum": 7}],
            "type": "number",
        },
        [5, 6.5],
        [4, 7, 8],
    ),
    "from the next whole number on": ({"type": "integer", "exclusiveMinimum": 100}, [101, 1000], [100, 99]),
    "common multiples": ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, [12, 24], [4, 6, 18]),
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
    "not both keys": (
        {"type": "object", "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}],
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
    "not that long, and not that short": (
        {"not": {"maxLength": 1}, "allOf": [{"not": {"minLength": 4}}, {"type": "string"}]},
        ["ab", "abc"],
        ["a", "abcd"],
    ),
    "not from a bound on": ({"not": {"minimum": 3}, "type": "number"}, [2.5], [3, 4]),
    "not a list": ({"type": "array", "not": {"enum": [[1], [2], 3]}, "maxItems": 1}, [[], [3]], [[1], [2]]),
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
    "not a condition": (
        {"not": {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}},
        [1, None],
        [3, "x"],
    ),
    "else alone": ({"if": {"type": "integer"}, "else": {"type": "string"}}, [1, "x"], [None, 1.5]),
    "not false": ({"not": False}, [1, {}], []),
    "none of several": ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, [1, 2.5], ["x", 4, None]),
    "a length of 2.0": ({"type": "string", "minLength": 2.0, "pattern": "b$"}, ["ab", "aaab"], ["b", "aa"]),
    "a reference with a tilde": (
        {"$defs": {"a~1b": {"type": "integer"}, "a/b": {"type": "string"}}, "$ref": "#/$defs/a~01b"},
        [1],
        ["x"],
    ),
    "an anchor inside a constant": (
        {"$defs": {"x": {"$anchor": "s", "type": "string"}}, "anyOf": [{"$ref": "#s"}, {"enum": [{"$anchor": "s"}]}]},
        ["x", {"$anchor": "s"}],
        [1, {}],
    ),
    "a reference inside a nested $id": (SCOPES, [{"v": 1}], [{"v": "s"}]),
    "an anchor of a nested $id": (
        {
            "$anchor": "a",
            "$defs": {"n": {"$id": "n", "items": {"$ref": "#a"}, "$defs": {"x": {"$anchor": "a", "type": "null"}}}},
            "properties": {"v": {"$ref": "n"}},
            "type": "object",
        },
        [{"v": [None]}],
        [{"v": [{}]}],
    ),
    "a $id relative to another one": (
        {
            "$id": "http://a/b/c",
            "$defs": {"n": {"$id": "d/e", "$defs": {"m": {"$id": "f", "type": "null"}}}},
            "items": {"$ref": "http://a/b/d/f"},
        },
        [[None]],
        [[1]],
    ),
    "a $id in an unknown keyword": (
        {
            "$defs": {
                "u": {"not-known": {"$id": "http://a/x", "type": "null"}},
                "x": {"$id": "http://a/x", "type": "integer"},
            },
            "items": {"$ref": "http://a/x"},
        },
        [[1]],
        [[None]],
    ),
    "a reference into an unknown keyword": (
        {"$defs": {"n": PARTS | {"$id": "n", "$ref": "#/parts/a"}}, "$ref": "n"},
        [[None]],
        [[1]],
    ),
    "an old $id beside a reference": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$id": "http://a/",
            "definitions": {"x": {"$id": "x", "type": "null"}, "b/x": {"$id": "b/x", "type": "integer"}},
            "items": {"$id": "b/", "$ref": "x"},
        },
        [[None]],
        [[1]],
    ),
    "an old $id that is an anchor": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"x": {"$id": "#n", "type": "null"}},
            "items": {"$ref": "#n"},
        },
        [[None]],
        [[1]],
    ),
    "reference with neighbours": (
        {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n", "minimum": 3}},
        [[3, 4]],
        [[2], ["x"]],
    ),
    "old reference has no neighbours": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"n": {"type": "integer"}},
            "items": {"$ref": "#/definitions/n", "minimum": 3, "uniqueItems": True},
        },
        [[3, 2]],
        [["x"]],
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
    "unique items beside any": (
        {"anyOf": [{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, {"maxItems": 1}]},
        [[3], [1]],
        [[1, 1], [3, 4]],
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


def writings(document: Any) -> list[bytes]:
    return [json.dumps(document, ensure_ascii=False, **how).encode() for how in WRITINGS]


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    schema, valid, invalid = CASES[name]
    automaton = compile_schema(schema, budget())
    dialect = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    judge = jsonschema_rs.validator_for(schema | {"$schema": dialect}, validate_formats=True)
    assert all(map(judge.is_valid, valid))
    assert not any(map(judge.is_valid, invalid))
    assert_language(automaton, *([text for each in some for text in writings(each)] for some in (valid, invalid)))


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


def test_an_array_that_still_needs_an_object_has_room_for_it() -> None:
    items = {"anyOf": [{"type": "object", "maxProperties": 0}, {"const": "x"}]}
    unique = {"type": "array", "items": items, "uniqueItems": True, "minItems": 2}
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    automaton = compile_schema({"$defs": {"n": {"anyOf": [nested, unique]}}, "$ref": "#/$defs/n"}, budget())
    depth = MAX_DEPTH - 2
    assert automaton.accepts(b'{"a":' * depth + b'["x",{}]' + b"}" * depth)
    assert automaton.walk(START, b'{"a":' * (depth + 1)) is None


REFUSED: dict[str, tuple[Any, str]] = {
    "unique objects": ({"items": {"type": "object"}, "uniqueItems": True, "minItems": 2}, "#/uniqueItems"),
    "unique objects of two schemas": (
        {"type": "array", "allOf": [{"items": {"type": "object"}, "uniqueItems": True}, {"uniqueItems": True}]}
        | {"minItems": 2},
        "compiled at #: ",
    ),
    "unique listed numbers and others": (
        {"properties": {"a": {"items": {"anyOf": [{"const": 1}, {"exclusiveMinimum": 3}]}, "uniqueItems": True}}},
        "#/properties/a/uniqueItems",
    ),
    "more items than differ": ({"items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}, "#/uniqueItems"),
    "unique first items": ({"prefixItems": [{"const": 1}], "uniqueItems": True}, "#/uniqueItems"),
    "not unique items": ({"not": {"uniqueItems": True}}, "#/not/uniqueItems"),
    "contains": ({"anyOf": [{"contains": {"const": 1}}]}, "#/anyOf/0/contains"),
    "unevaluated": ({"unevaluatedProperties": False}, "#/unevaluatedProperties"),
    "dependent schemas": ({"dependentSchemas": {"a": {}}}, "#/dependentSchemas"),
    "remote reference": ({"items": {"$ref": "https://example.org/x.json"}}, "#/items/$ref"),
    "dynamic reference": ({"items": {"$dynamicRef": "#x"}}, "#/items/$dynamicRef"),
    "reference to nothing": ({"$ref": "#/$defs/x"}, "leads nowhere"),
    "reference to itself": ({"$ref": "#"}, "refers to itself"),
    "alternative of itself": (
        {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}, "$ref": "#/$defs/x"},
        "refers to itself",
    ),
    "endless": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "accepts nothing"),
    "lookbehind": ({"properties": {"a/b": {"pattern": "(?<=x)"}}}, "#/properties/a~1b/pattern"),
    "nothing": ({"type": "string", "enum": [1]}, "accepts nothing"),
    "no keys": ({"type": "object", "required": ["a"], "properties": {"a": False}}, "accepts nothing"),
    "too few keys": ({"type": "object", "minProperties": 3, "propertyNames": {"enum": ["a", "b"]}}, "accepts nothing"),
    "no multiple": ({"multipleOf": 0.3, "minimum": 0.31, "maximum": 0.59, "type": "number"}, "accepts nothing"),
    "not keys, of few": (
        {"maxProperties": 3, "not": {"patternProperties": {"a": {"type": "null"}}}},
        "#/not/patternProperties",
    ),
    "not two kinds of keys": (
        {"allOf": [{"not": {"additionalProperties": {"type": kind}}} for kind in ("null", "string")]},
        "/not/additionalProperties",
    ),
    "not keys that have names": (
        {
            "properties": {"a": True},
            "additionalProperties": False,
            "not": {"patternProperties": {"^a$": {"type": "null"}}},
        },
        "#/not/patternProperties",
    ),
    "a chain of references": (
        {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(2000)}, "$ref": "#/$defs/0"},
        "refers to itself without end",
    ),
    "no type": ({"type": "text"}, "#/type"),
    "no bound": ({"items": {"maximum": math.inf}}, "none in JSON: inf"),
    "no length": ({"minLength": True}, "#/minLength"),
    "a key with a slash": ({"dependencies": {"a/b": {"contains": True}}}, "#/dependencies/a~1b/contains"),
    "one number, excluded": ({"type": "number", "minimum": 1.5, "exclusiveMaximum": 1.5}, "accepts nothing"),
    "not an unknown format": ({"not": {"format": "unheard-of"}}, "accepts nothing"),
    "no divisor": ({"multipleOf": -2}, "#/multipleOf"),
    "branches": ({"allOf": [{"anyOf": [{"minimum": n}, {"maxLength": n}]} for n in range(12)]}, "more than 2048"),
    "no schema": ({"items": 3}, "#/items"),
    "repeats": ({"pattern": "(a|b)*a(a|b){17}"}, "#/pattern"),
}


def test_alternatives_of_open_objects_need_few_states() -> None:
    """A few for each alternative, and not twice as many."""
    sizes = [
        compile_schema({"type": "object", "anyOf": [tagged(n) for n in range(size)]}, budget()).num_states
        for size in (4, 8, 12, 24)
    ]
    assert sizes[3] - sizes[2] <= 3 * (sizes[2] - sizes[1]) + 60
    assert sizes[3] < 1500, sizes


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(GrammarError) as error:
        compile_schema(schema, budget(states=5000))
    assert message in str(error.value)


def test_nesting_is_bounded() -> None:
    array: Any = {"maxItems": 0}
    for _ in range(63):
        array = {"items": array}
    compile_schema(array, budget())
    with pytest.raises(GrammarError, match="nested deeper than 64"):
        compile_schema({"items": array}, budget())
    tree: Any = {"type": "integer"}
    for _ in range(40):  # maps of schemas are no schemas
        tree = {"properties": {"a": tree}}
    compile_schema(tree, budget())


CLOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {
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
