"""References to other parts of a schema, by path, by anchor and by $id."""

import pytest

from tests.unit.json_schema.judged import SchemaCase, check_schema

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


CASES: dict[str, SchemaCase] = {
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
    "two schemas with one $id": (
        {
            "$defs": {"n": {"$id": "n", "type": "integer"}, "m": {"$id": "n", "type": "null"}},
            "items": {"$ref": "n"},
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
            "items": {"$ref": "#/definitions/n", "minimum": 3, "contains": True},
        },
        [[3, 2]],
        [["x"]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_is_valid_and_nothing_else(name: str) -> None:
    check_schema(*CASES[name])
