"""Schemas that are refused, and that the error names the place or the reason."""

import math
from typing import Any

import pytest

from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from shared.grammar.schema import disjuncts
from tests.grammars import budget

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
    "no characters": ({"type": "string", "pattern": "^$", "minLength": 1}, "accepts nothing"),
    "no keys": ({"type": "object", "required": ["a"], "properties": {"a": False}}, "accepts nothing"),
    "more keys than the most": (
        {"type": "object", "required": ["a"], "minProperties": 3, "maxProperties": 2},
        "accepts nothing",
    ),
    "too few keys": ({"type": "object", "minProperties": 3, "propertyNames": {"enum": ["a", "b"]}}, "accepts nothing"),
    "no multiple": ({"multipleOf": 0.3, "minimum": 0.31, "maximum": 0.59, "type": "number"}, "accepts nothing"),
    "another key, of few": (
        {"maxProperties": 1, "not": {"properties": {"a": True}, "additionalProperties": False}, "type": "object"},
        "#/not/additionalProperties",
    ),
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    schema, message = REFUSED[name]
    with pytest.raises(GrammarError) as error:
        compile_schema(schema, budget(states=5000))
    assert message in str(error.value)


def test_branches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disjuncts, "MAX_BRANCHES", 3)
    compile_schema({"anyOf": [{"const": n} for n in range(3)]}, budget())
    with pytest.raises(GrammarError, match="more than 3 combined alternatives"):
        compile_schema({"anyOf": [{"const": n} for n in range(4)]}, budget())


def test_nesting_is_bounded() -> None:
    for wrap in (lambda schema: {"items": schema}, lambda schema: {"allOf": [schema]}):
        nested: Any = {"maxItems": 0}
        for _ in range(63):
            nested = wrap(nested)
        compile_schema(nested, budget())
        with pytest.raises(GrammarError, match="nested deeper than 64"):
            compile_schema(wrap(nested), budget())
    tree: Any = {"type": "integer"}
    for _ in range(40):  # maps of schemas are no schemas
        tree = {"properties": {"a": tree}}
    compile_schema(tree, budget())
