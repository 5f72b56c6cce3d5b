"""Every two keywords of a type: beside one another, as alternatives, as opposites, and as a condition."""

import json
from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

import jsonschema_rs
import pytest

from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from tests.grammars import assert_language, budget

KEYWORDS: dict[str, list[dict[str, Any]]] = {
    "number": [
        *({name: bound} for name in ("minimum", "exclusiveMinimum") for bound in (1, 1.5)),
        *({name: bound} for name in ("maximum", "exclusiveMaximum") for bound in (3, 2.5)),
        *({"multipleOf": divisor} for divisor in (2, 0.5, 0.75)),
        *({"type": "integer"}, {"enum": [1, 2.5]}, {"const": 2}),
    ],
    "string": [
        *({"minLength": 1}, {"minLength": 2}, {"maxLength": 1}, {"maxLength": 2}, {"enum": ["a", "ab", "é"]}),
        *({"pattern": pattern} for pattern in ("^a", "b$", "^$", "^(a|bb)*$", "(?!a)^.b?$")),
    ],
    "array": [
        *({"minItems": 1}, {"minItems": 2}, {"maxItems": 1}, {"maxItems": 2}),
        *({"items": {"type": "integer"}}, {"items": {"enum": [1, "a"]}}, {"items": False}),
        *({"prefixItems": [{"type": "string"}]}, {"prefixItems": [{"const": 1}, {"const": 2}]}),
    ],
    "object": [
        *({"required": ["a"]}, {"required": ["b", "c"]}, {"minProperties": 1}, {"minProperties": 2}),
        *({"maxProperties": 1}, {"propertyNames": {"maxLength": 1}}),
        *({"dependentRequired": {"a": ["b"]}}, {"dependentRequired": {"b": ["c"], "c": ["d"]}}),
        *({"properties": {"a": {"const": 1}, "b": {"const": "x"}}}, {"patternProperties": {"^a": {"type": "integer"}}}),
        *(
            {"additionalProperties": {"type": "string"}},
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False},
        ),
    ],
}
OBJECTS = [(), ("a",), ("b",), ("c",), ("ab",), ("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c"), ("b", "c", "d")]
DOCUMENTS: dict[str, list[Any]] = {
    "number": [-1, 0, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 6],
    "string": ["", "a", "b", "é", "ab", "bb", "éb", "abb", "ba"],
    "array": [[], [1], ["a"], [2], [1, 2], ["a", 1], ["a", "a"], [1, 1], [1, "a"], [1, 2, 3], ["a", 1, None]],
    "object": [dict.fromkeys(keys, value) for keys in OBJECTS for value in (1, "x")] + [{"b": "x", "a": 1}],
}
PAIRS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "both": lambda one, other: {"allOf": [one, other]},
    "any": lambda one, other: {"anyOf": [one, other]},
    "exactly one": lambda one, other: {"oneOf": [one, other]},
    "not the other": lambda one, other: one | {"not": other},
    "a condition": lambda one, other: {"if": one, "then": other},
}


@pytest.mark.parametrize("kind", KEYWORDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_two_keywords_accept_what_is_valid(pair: str, kind: str) -> None:
    """Or their schema is refused as unsupported, or since none of the documents is valid."""
    for one, other in (permutations if pair == "not the other" else combinations)(KEYWORDS[kind], 2):
        schema = {"type": kind} | PAIRS[pair](one, other)
        judge = jsonschema_rs.Draft202012Validator(schema)
        texts: tuple[list[str], list[str]] = [], []
        for document in DOCUMENTS[kind]:
            texts[judge.is_valid(document)].append(json.dumps(document, ensure_ascii=False))
        try:
            automaton = compile_schema(schema, budget())
        except GrammarError as error:
            is_empty = "accepts nothing" in str(error)
            assert not (is_empty and texts[1]), schema
        else:
            assert_language(automaton, texts[1], texts[0], f" by {schema}")
