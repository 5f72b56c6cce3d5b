"""What the references of a JSON Schema mean: the resources of a document, and their anchors. Introduced in phase 12.

A schema with ``$id`` is a separate resource: ``#/…`` and anchors inside it begin there, and relative references are
relative to its URI (RFC 3986). Only keywords that contain schemas are searched: a ``$id`` in a constant, an example or
an unknown keyword identifies nothing, unless a reference leads there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

from shared.grammar.limits import Budget

HOLD_ONE = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "then"}
    | {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
HOLD_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
HOLD_MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
Link = tuple[Any, str] | None
"""The path to a node: the link of its parent, and a key."""
Found = tuple[Any, str]
"""A schema, and its path."""


@dataclass(frozen=True, eq=False)
class Resource:
    """A schema that opens a scope of references."""

    uri: str
    schema: Any
    path: str


class References:
    """The resources and anchors of one document, found when the first reference is resolved. ``is_old``: drafts before
    2019-09, in which siblings of ``$ref`` are ignored.
    """

    def __init__(self, root: Any, budget: Budget, *, is_old: bool) -> None:
        self.root, self.budget, self.is_old = root, budget, is_old
        self.names = ("$id", "id") if is_old else ("$id",)
        self.resources: dict[str, Resource] = {}
        self.anchors: dict[tuple[str, str], Found] = {}
        self.scopes: dict[int, Resource] = {}  # keyed by the id() of a schema, which the root keeps alive

    def find(self, reference: str, schema: Any) -> Found | None:
        """The schema that a reference inside another schema points to; None if it leads nowhere. Raises LookupError if
        the target is in another document.
        """
        if not self.scopes:
            whole = Resource("", self.root, "#")
            self.resources[""] = whole
            self._search(self.root, whole, None)
        base, _, fragment = reference.partition("#")
        scope = self.scopes.get(id(schema), self.resources[""])
        if base:
            self.budget.spend((len(scope.uri) + len(base)) // 8)
            uri = urljoin(scope.uri, base)
            if uri not in self.resources:
                raise LookupError(uri)
            scope = self.resources[uri]
        if fragment and not fragment.startswith("/"):
            return self.anchors.get((scope.uri, unquote(fragment)))
        found: Any = scope.schema
        parts = fragment.split("/")[1:]
        self.budget.spend(1 + len(parts) + len(reference) // 16)
        for part in parts:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
        if isinstance(found, dict) and id(found) not in self.scopes:
            self._search(found, scope, (None, fragment[1:]))
        return found, scope.path + fragment

    def _search(self, start: Any, scope: Resource, link: Link) -> None:
        """Find the scopes of a schema and of those inside it."""
        waiting: list[tuple[Any, Resource, Link]] = [(start, scope, link)]
        for schema, scope, link in waiting:  # which grows
            self.budget.spend(4)
            if not isinstance(schema, dict) or id(schema) in self.scopes:
                continue
            if not (self.is_old and "$ref" in schema):
                scope = self._named(schema, scope, link)
            self.scopes[id(schema)] = scope
            for keys, child in _inside(schema):
                way: Link = link
                for key in keys:
                    way = way, key
                waiting.append((child, scope, way))

    def _named(self, schema: dict[str, Any], scope: Resource, link: Link) -> Resource:
        """The scope inside a schema, which the schema itself may open."""
        identifier = next((schema[name] for name in self.names if isinstance(schema.get(name), str)), "")
        base, _, fragment = identifier.partition("#")
        if base:
            self.budget.spend((len(scope.uri) + len(base)) // 8)
            scope = Resource(urljoin(scope.uri, base), schema, _path(link))
            self.resources.setdefault(scope.uri, scope)
        for anchor in (fragment, schema.get("$anchor"), schema.get("$dynamicAnchor")):
            if isinstance(anchor, str) and anchor:
                self.anchors.setdefault((scope.uri, anchor), (schema, _path(link)))
        return scope


def _inside(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas in the keywords of a schema, with the keys that lead to them."""
    for keyword, value in schema.items():
        if keyword in HOLD_ONE and isinstance(value, dict):
            yield (keyword,), value
        elif keyword in HOLD_LISTS and isinstance(value, list):
            yield from (((keyword, str(number)), child) for number, child in enumerate(value))
        elif keyword in HOLD_MAPS and isinstance(value, dict):
            yield from (((keyword, key), child) for key, child in value.items())


def _path(link: Link) -> str:
    keys: list[str] = []
    while link is not None:
        link, key = link
        keys.append(key.replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(keys)])
