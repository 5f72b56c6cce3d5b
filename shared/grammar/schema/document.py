"""The document of a JSON Schema: its nodes, their locations, and what its references mean. Introduced in phase 12.

A node is a schema inside the document; a literal is a node that holds or, if negated, does not. Compilation works on
literals, so a schema that is reached in several ways is read once.

Invariant: an unsupported keyword that asserts something is refused with its location, never ignored.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from shared.grammar.limits import Budget, GrammarError, WorkError
from shared.grammar.schema.references import References
from shared.grammar.schema.shapes import Value

REFUSED_KEYWORDS = (
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
    "dependentSchemas",
    "$dynamicRef",
    "$recursiveRef",
)
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependencies"})
"""Keywords whose schemas are nested one level deeper in the text."""
OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"]
)
"""Keywords that assert nothing: next to them, a reference means exactly what it leads to."""
TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


class SchemaDocument:
    """The nodes of one schema, numbered in the order in which they are met. ``is_closed``: objects whose schema names
    properties, and says nothing about others, have no others. Raises GrammarError for anything that is not a schema, or
    is nested deeper than the limit.
    """

    def __init__(self, root: Any, budget: Budget, *, is_closed: bool = False) -> None:
        self.budget, self.is_closed = budget, is_closed
        self.schemas: list[Any] = []
        self.paths: list[str] = []
        self._numbers: dict[int, int] = {}
        self._constants: dict[int, list[int]] = {}
        self._lists: dict[int, list[Any]] = {}
        self.places: dict[tuple[str, str], str] = {}
        """Where a pattern or a format first occurred."""
        self._check_nesting(root)
        self.root = root
        dialect = root.get("$schema", "") if isinstance(root, Mapping) else ""
        self.is_old = any(draft in str(dialect) for draft in OLD_DRAFTS)
        self.references = References(root, budget, is_old=self.is_old)

    def _check_nesting(self, root: Any) -> None:
        """Limit the nesting of schemas, and of the text, which also has lists, maps of schemas and values."""
        limit = self.budget.limits.nesting
        level, depth = [(root, 1)], 0
        while level:
            depth += 1
            if depth > 2 * limit + 1 or any(schemas > limit for _, schemas in level):
                raise GrammarError(f"The schema is nested deeper than {limit} levels.")
            self.budget.spend(sum(2 + 2 * len(node) for node, _ in level if isinstance(node, (dict, list))))
            self._check_numbers(node for node, _ in level)
            level = [
                (child, schemas + (isinstance(node, dict) and key not in MAPS))
                for node, schemas in level
                if isinstance(node, (dict, list))
                for key, child in (node.items() if isinstance(node, dict) else enumerate(node))
                if isinstance(child, (dict, list))
            ]

    @staticmethod
    def _check_numbers(nodes: Iterable[Any]) -> None:
        for node in nodes:
            for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
                if isinstance(child, float) and not math.isfinite(child):
                    raise GrammarError(f"The schema has a number that is none in JSON: {child}.")

    def literal(self, schema: Any, path: str, *, holds: bool = True) -> int:
        """The literal of a schema; the same object gives the same node, and a mere reference gives its target's
        node."""
        self.budget.spend(2 + len(path) // 128)
        number = self._numbers.get(id(schema)) if isinstance(schema, dict) else None
        if number is None:
            if not isinstance(schema, (dict, bool)):
                raise self.error(path, f"a schema is an object or a boolean, not {schema!r:.50}")
            number = len(self.schemas)
            self.schemas.append(schema)
            self.paths.append(path)
            if isinstance(schema, dict):
                self._numbers[id(schema)] = number
                self._refuse_keywords(schema, path)
                if "$ref" in schema and (self.is_old or schema.keys() - ANNOTATIONS == {"$ref"}):
                    self._numbers[id(schema)] = number = self._target(schema, path, number)
        return 2 * number + (not holds)

    def _target(self, schema: dict[str, Any], path: str, number: int) -> int:
        """The node that a reference leads to; the reference itself as long as that is unknown, or if it leads
        nowhere."""
        try:
            return self.resolve(schema, f"{path}/$ref") // 2
        except WorkError:
            raise
        except GrammarError:  # an error only if the schema's content is needed
            return number

    def _refuse_keywords(self, schema: dict[str, Any], path: str) -> None:
        if "$ref" in schema and self.is_old:
            return
        for keyword in REFUSED_KEYWORDS:
            if keyword in schema:
                raise self.error(f"{path}/{keyword}", "this keyword is not supported")

    def constant(self, schema: dict[str, Any]) -> list[Any]:
        """The value of ``const`` as a list, the same object at each call."""
        return self._lists.setdefault(id(schema), [schema["const"]])

    def constants(self, values: list[Any], path: str) -> list[int]:
        """Literals of the arrays and objects among the values of an ``enum``."""
        if id(values) not in self._constants:
            self.budget.spend(len(values))
            self._constants[id(values)] = [
                self.literal(_schema_of(value), f"{path}/{number}")
                for number, value in enumerate(values)
                if isinstance(value, (dict, list))
            ]
        return self._constants[id(values)]

    @cached_property
    def nothing(self) -> Value:
        """The value that cannot be satisfied."""
        return frozenset({self.literal(False, "#")})

    def resolve(self, schema: Any, path: str) -> int:
        """The literal to which the local ``$ref`` of a schema points. Raises GrammarError for a remote reference, or
        one that leads nowhere.
        """
        reference = schema["$ref"]
        if not isinstance(reference, str):
            raise self.error(path, f"a reference is a string, not {reference!r:.50}")
        try:
            found = self.references.find(reference, schema)
        except (LookupError, ValueError):
            raise self.error(path, f"remote references are not supported: {reference!r:.200}") from None
        if found is None:
            raise self.error(path, f"the reference {reference!r:.200} leads nowhere")
        return self.literal(*found)

    @staticmethod
    def error(path: str, reason: str) -> GrammarError:
        return GrammarError(f"The schema cannot be compiled at {path}: {reason}.")


def escape(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _schema_of(value: Any) -> dict[str, Any]:
    """The schema of one array or object."""
    if isinstance(value, list):
        items = [{"enum": [item]} for item in value]
        return {"type": "array", "minItems": len(value), "items": items, "additionalItems": False}
    members = {key: {"enum": [member]} for key, member in value.items()}
    return {"type": "object", "required": list(value), "properties": members, "additionalProperties": False}
