"""A compiled schema beside another validator: the documents that it accepts, in each way that JSON can be written."""

import json
from typing import Any

import jsonschema_rs

from shared.grammar.documents.json_schema import compile_schema
from tests.grammars import assert_language, budget

SchemaCase = tuple[Any, list[Any], list[Any]]
"""A schema, documents that are valid, and others that are not."""
WRITINGS: list[dict[str, Any]] = [{}, {"indent": 2}, {"separators": (",", ":")}]


def writings(document: Any) -> list[bytes]:
    return [json.dumps(document, ensure_ascii=False, **how).encode() for how in WRITINGS]


def check_schema(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """The automaton accepts what is valid and nothing else, and the other validator judges the same."""
    automaton = compile_schema(schema, budget())
    dialect = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    judge = jsonschema_rs.validator_for(schema | {"$schema": dialect}, validate_formats=True)
    assert [document for document in valid if not judge.is_valid(document)] == []
    assert [document for document in invalid if judge.is_valid(document)] == []
    assert_language(automaton, *([text for each in some for text in writings(each)] for some in (valid, invalid)))
