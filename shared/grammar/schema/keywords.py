"""The keywords of one node of a schema, read and checked. Introduced in phase 12.

A keyword is a list of clauses, each of which requires one of its alternatives; an alternative is a conjunction of
literals and facts. The negation of a keyword is one clause.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.grammar.schema.document import TYPES, SchemaDocument, escape
from shared.grammar.schema.facts import Facts
from shared.grammar.schema.shapes import ANYTHING, Value

Fact = Callable[[Facts], Facts]
Conjunction = tuple[int | Fact, ...]
Clause = tuple[Conjunction, ...]
IMPOSSIBLE = 2**31 - 1


@dataclass(frozen=True)
class Keywords:
    """The keywords of one node of a document; ``is_disjoint`` says whether nothing satisfies both of two literals."""

    document: SchemaDocument
    node: int
    is_disjoint: Callable[[int, int], bool]

    @property
    def schema(self) -> dict[str, Any]:
        return self.document.schemas[self.node]

    def literal(self, *keys: Any, holds: bool = True) -> int:
        """The literal of a schema nested in this one."""
        schema: Any = self.schema
        for key in keys:
            schema = schema[key]
        path = "/".join([self.document.paths[self.node], *(escape(str(key)) for key in keys)])
        return self.document.literal(schema, path, holds=holds)

    def literals(self, keyword: str, *, holds: bool = True) -> list[int]:
        return [self.literal(keyword, number, holds=holds) for number in range(len(self.expect(keyword, list)))]

    def value(self, *keys: Any) -> Value:
        """Like :meth:`literal`, but any value if the schema says nothing."""
        literal = self.literal(*keys)
        return ANYTHING if self.document.schemas[literal // 2] in (True, {}) else frozenset({literal})

    def expect(self, keyword: str, *types: type) -> Any:
        found = self.schema[keyword]
        if not isinstance(found, types) or (isinstance(found, bool) and bool not in types):
            raise self.error(keyword, f"{found!r:.50} has the wrong type")
        return found

    def path(self, keyword: str) -> str:
        return f"{self.document.paths[self.node]}/{keyword}"

    def error(self, keyword: str, reason: str) -> Exception:
        return self.document.error(self.path(keyword), reason)

    def needed_members(self) -> set[str]:
        """The required keys whose values a schema constrains."""
        required, members = self.schema.get("required"), self.schema.get("properties")
        if not isinstance(required, list) or not isinstance(members, dict):
            return set()
        self.document.budget.spend(len(members) + len(required))
        keys = {key for key in required if isinstance(key, str)}
        return {key for key in members if key in keys and self.value("properties", key)}

    def parts(self) -> list[int]:
        """The schemas that apply to the same value as this one."""
        if isinstance(self.schema, bool):
            return []
        found = [self.reference()] if "$ref" in self.schema else []
        if found and self.document.is_old:
            return found
        found += [self.literal(keyword) for keyword in ("not", "if", "then", "else") if keyword in self.schema]
        for keyword in ("allOf", "anyOf", "oneOf"):
            found += self.literals(keyword) if keyword in self.schema else []
        dependencies = self.schema.get("dependencies", {})
        found += [
            self.literal("dependencies", key) for key in dependencies if not isinstance(dependencies[key], (list, str))
        ]
        return found

    def reference(self) -> int:
        return self.document.resolve(self.schema, self.path("$ref"))

    def types(self) -> list[str]:
        found = self.schema["type"]
        names = found if isinstance(found, list) else [found]
        for name in names:
            if name not in (*TYPES, "integer"):
                raise self.error("type", f"{name!r:.50} is no type")
        return names

    def values(self, keyword: str) -> list[Any]:
        return self.expect("enum", list) if keyword == "enum" else self.document.constant(self.schema)

    def count(self, keyword: str) -> int:
        found = self.expect(keyword, int, float)
        if found != int(found):
            raise self.error(keyword, f"{found} is not a whole number")
        return min(max(int(found), 0), IMPOSSIBLE)

    def texts(self, found: Any, keyword: str) -> list[str]:
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.error(keyword, f"{found!r:.50} is not a list of keys")
        return found


def possible_types(document: SchemaDocument, node: int, depth: int = 8) -> frozenset[str]:
    """Types that include those of all values that satisfy a node, judging by its simplest keywords."""
    document.budget.spend(2)
    keywords = Keywords(document, node, lambda one, other: False)
    schema, found = keywords.schema, TYPES
    if isinstance(schema, bool) or not depth:
        return TYPES
    if "$ref" in schema:
        found &= possible_types(document, keywords.reference() // 2, depth - 1)
        if document.is_old:
            return found
    if "type" in schema:
        found &= {"number" if name == "integer" else name for name in keywords.types()}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            parts = [possible_types(document, literal // 2, depth - 1) for literal in keywords.literals(keyword)]
            found &= frozenset().union(*parts)
    return found


def say(fact: Fact) -> list[Clause]:
    return [((fact,),)]


def refused(keywords: Keywords, keyword: str) -> Clause:
    raise keywords.error(keyword, "the opposite of this keyword cannot be compiled")
