"""Schemas of scalars: types, numbers, strings, and what is listed; what each accepts, and what it refuses."""

import pytest

from tests.unit.json_schema.judged import SchemaCase, check_schema

CASES: dict[str, SchemaCase] = {
    "anything": ({}, [1, None, True, [1, [{"a": "x"}]], "é\n\x7f😀", 1e-06, 1e20, -0.0, -1.5e300], []),
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
    "multiples of many remainders below a bound": (
        {"multipleOf": 100_003, "maximum": 200 * 100_003},
        [0, 100_003, -100 * 100_003],
        [100_004, 201 * 100_003],
    ),
    "old bounds": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True} | {"maximum": 3},
        [2, 1.5, 3],
        [1, 0, 4],
    ),
    "old upper bounds": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True, "minimum": 1},
        [1, 2.5],
        [3, 0],
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
    "patterns that contradict each other": (
        {"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}], "maxLength": 5, "type": ["string", "null"]},
        [None],
        ["a", "b"],
    ),
    "a lookahead at each character": (
        {"allOf": [{"pattern": "^((?!mode)(?!Mode).)*$"}, {"pattern": "^(?=.*[0-9])(?=.*é)"}]},
        ["mod1é", "é mo de 2"],
        ["a1émode", "é", "1", "Mode1é"],
    ),
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
    "not that long, and not that short": (
        {"not": {"maxLength": 1}, "allOf": [{"not": {"minLength": 4}}, {"type": "string"}]},
        ["ab", "abc"],
        ["a", "abcd"],
    ),
    "not from a bound on": ({"not": {"minimum": 3}, "type": "number"}, [2.5], [3, 4]),
    "a length of 2.0": ({"type": "string", "minLength": 2.0, "pattern": "b$"}, ["ab", "aaab"], ["b", "aa"]),
}


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    check_schema(*CASES[name])
