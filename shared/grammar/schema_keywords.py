"""What each keyword of JSON Schema says, and what its opposite says. Introduced in phase 12.

A keyword is a list of clauses; of each clause one alternative must hold; an alternative is a conjunction of literals
and facts. The negation of a schema is one clause, with the opposites of all its keywords as alternatives (De Morgan);
it is refused where it meets a keyword whose opposite no shape can say.

Invariant: clauses say exactly what the keyword says, for values of every type.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shared.grammar.schema_document import TYPES, SchemaDocument, escape
from shared.grammar.schema_facts import Facts, exact
from shared.grammar.shapes import ANYTHING, Value

Fact = Callable[[Facts], Facts]
Conjunction = tuple[int | Fact, ...]
Clause = tuple[Conjunction, ...]

LENGTHS = {
    "minLength": ("string", "fewest"),
    "maxLength": ("string", "most"),
    "minItems": ("array", "fewest"),
    "maxItems": ("array", "most"),
    "minProperties": ("object", "fewest"),
    "maxProperties": ("object", "most"),
}
BOUNDS = {"minimum": "low", "exclusiveMinimum": "low", "maximum": "high", "exclusiveMaximum": "high"}
OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")
IMPOSSIBLE = 2**31 - 1


@dataclass(frozen=True)
class Keywords:
    """The keywords of one node of a document.

    ``is_disjoint`` tells of two literals whether nothing satisfies both.
    """

    document: SchemaDocument
    node: int
    is_disjoint: Callable[[int, int], bool]

    @property
    def schema(self) -> dict[str, Any]:
        return self.document.schemas[self.node]

    def literal(self, *keys: Any, holds: bool = True) -> int:
        """The literal of a schema that stands inside this one."""
        schema: Any = self.schema
        for key in keys:
            schema = schema[key]
        path = "/".join([self.document.paths[self.node], *(escape(str(key)) for key in keys)])
        return self.document.literal(schema, path, holds=holds)

    def literals(self, keyword: str, *, holds: bool = True) -> list[int]:
        return [self.literal(keyword, number, holds=holds) for number in range(len(self.expect(keyword, list)))]

    def value(self, *keys: Any) -> Value:
        """As :meth:`literal`, but any value where the schema says nothing."""
        literal = self.literal(*keys)
        return ANYTHING if self.document.schemas[literal // 2] in (True, {}) else frozenset({literal})

    def expect(self, keyword: str, *types: type) -> Any:
        found = self.schema[keyword]
        if not isinstance(found, types) or (isinstance(found, bool) and bool not in types):
            raise self.error(keyword, f"{found!r:.50} has the wrong type")
        return found

    def error(self, keyword: str, reason: str) -> Exception:
        return self.document.error(f"{self.document.paths[self.node]}/{keyword}", reason)

    def stated(self) -> list[Clause]:
        """What the node says."""
        if isinstance(self.schema, bool):
            return [] if self.schema else [()]
        if "$ref" in self.schema and self.document.is_old:
            return [((self.reference(),),)]
        return [
            clause for keyword in self.schema if keyword in KEYWORDS for clause in KEYWORDS[keyword][0](self, keyword)
        ]

    def denied(self) -> list[Clause]:
        """What the opposite of the node says."""
        if isinstance(self.schema, bool):
            return [()] if self.schema else []
        if "$ref" in self.schema and self.document.is_old:
            return [((self.reference() ^ 1,),)]
        found = [KEYWORDS[keyword][1](self, keyword) for keyword in self.schema if keyword in KEYWORDS]
        return [tuple(alternative for clause in found for alternative in clause)]

    def needed_members(self) -> set[str]:
        """The keys that are required and whose values a schema judges."""
        required, members = self.schema.get("required"), self.schema.get("properties")
        if not isinstance(required, list) or not isinstance(members, dict):
            return set()
        return {key for key in members if key in required and self.value("properties", key)}

    def parts(self) -> list[int]:
        """The schemas that judge the same value as this one."""
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
        return self.document.resolve(self.schema["$ref"], f"{self.document.paths[self.node]}/$ref")

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


def _fact(fact: Fact) -> list[Clause]:
    return [((fact,),)]


def _only(*types: str) -> Fact:
    return lambda facts: facts.only(*types)


def _object(**sets: Any) -> Fact:
    return lambda facts: facts.with_object(**sets)


def _is_object(**sets: Any) -> Fact:
    return lambda facts: facts.only("object").with_object(**sets)


def _enum(keywords: Keywords, keyword: str) -> list[Clause]:
    values = keywords.values(keyword)
    constants = keywords.document.constants(values, f"{keywords.document.paths[keywords.node]}/{keyword}")
    clause: Clause = tuple((literal,) for literal in constants)
    return [((lambda facts: facts.among(values),), *clause) if len(constants) < len(values) else clause]


def _not_enum(keywords: Keywords, keyword: str) -> Clause:
    values = keywords.values(keyword)
    constants = keywords.document.constants(values, f"{keywords.document.paths[keywords.node]}/{keyword}")
    return ((lambda facts: facts.not_among(values), *(literal ^ 1 for literal in constants)),)


def _one_of(keywords: Keywords, keyword: str) -> list[Clause]:
    literals = keywords.literals(keyword)
    clause = []
    for number, one in enumerate(literals):
        others = literals[:number] + literals[number + 1 :]
        if one not in others:
            clause.append((one, *(other ^ 1 for other in others if not keywords.is_disjoint(one, other))))
    return [tuple(clause)]


def _not_one_of(keywords: Keywords, keyword: str) -> Clause:
    literals = keywords.literals(keyword)
    pairs = [(one, other) for number, one in enumerate(literals) for other in literals[:number]]
    return (tuple(literal ^ 1 for literal in literals), *(pair for pair in pairs if not keywords.is_disjoint(*pair)))


def _if(keywords: Keywords, keyword: str) -> list[Clause]:
    schema, condition = keywords.schema, keywords.literal("if")
    then = (keywords.literal("then"),) if "then" in schema else ()
    other = (keywords.literal("else"),) if "else" in schema else ()
    return [((condition, *then), (condition ^ 1, *other))] if then or other else []


def _not_if(keywords: Keywords, keyword: str) -> Clause:
    condition = keywords.literal("if")
    return tuple(
        (literal, keywords.literal(branch, holds=False))
        for literal, branch in ((condition, "then"), (condition ^ 1, "else"))
        if branch in keywords.schema
    )


def _bound(keywords: Keywords, keyword: str) -> tuple[str, Any, bool] | None:
    """Which side a keyword bounds, where, and whether the bound is excluded (draft 4 says so beside it)."""
    found = keywords.expect(keyword, int, float, bool)
    if isinstance(found, bool):
        return None
    old = keywords.schema.get("exclusiveM" + keyword[1:]) is True
    return BOUNDS[keyword], exact(found), keyword.startswith("exclusive") or old


def _bounded(keywords: Keywords, keyword: str) -> list[Clause]:
    if not (bound := _bound(keywords, keyword)):
        return []
    side, value, is_excluded = bound
    return _fact(lambda facts: facts.with_bound(side, value, is_excluded))


def _not_bounded(keywords: Keywords, keyword: str) -> Clause:
    if not (bound := _bound(keywords, keyword)):
        return ()
    side, value, is_excluded = bound
    other = "high" if side == "low" else "low"
    return ((lambda facts: facts.only("number").with_bound(other, value, not is_excluded),),)


def _divisor(keywords: Keywords, keyword: str) -> int:
    found = exact(keywords.expect(keyword, int, float))
    if found.denominator != 1 or found <= 0:
        raise keywords.error(keyword, f"only whole divisors are supported, not {float(found):g}")
    return int(found)


def _multiple(keywords: Keywords, keyword: str) -> list[Clause]:
    divisor = _divisor(keywords, keyword)
    return _fact(lambda facts: facts.multiple_of(divisor))


def _not_multiple(keywords: Keywords, keyword: str) -> Clause:
    raise keywords.error(keyword, "the opposite of this keyword cannot be compiled")


def _length(keywords: Keywords, keyword: str) -> list[Clause]:
    kind, side = LENGTHS[keyword]
    count = keywords.count(keyword)
    return _fact(lambda facts: facts.with_lengths(kind, **{side: count}))


def _not_length(keywords: Keywords, keyword: str) -> Clause:
    kind, side = LENGTHS[keyword]
    count = keywords.count(keyword)
    if side == "fewest":
        return ((lambda facts: facts.only(kind).with_lengths(kind, most=count - 1),),) if count else ()
    return ((lambda facts: facts.only(kind).with_lengths(kind, fewest=count + 1),),)


def _text(is_required: bool) -> Callable[[Keywords, str], Any]:
    def read(keywords: Keywords, keyword: str) -> Any:
        text = keywords.expect(keyword, str)
        found = frozenset({(text, is_required)})
        path = f"{keywords.document.paths[keywords.node]}/{keyword}"
        keywords.document.places.setdefault((keyword, text), path)
        if is_required:
            return _fact(lambda facts: facts.with_texts(keyword, found))
        return ((lambda facts: facts.only("string").with_texts(keyword, found),),)

    return read


def _items(keywords: Keywords, keyword: str) -> list[Clause]:
    first, rest = _array(keywords)
    if keyword != ("items" if "items" in keywords.schema else "prefixItems"):
        return []  # read with the other one
    return _fact(lambda facts: replace(facts, array=facts.array.also(first, rest)))


def _array(keywords: Keywords) -> tuple[tuple[Value, ...], Value]:
    """The values of the first items, and of all others."""
    schema = keywords.schema
    listed = "items" if isinstance(schema.get("items"), list) else "prefixItems"
    if listed == "prefixItems" and keywords.document.is_old:
        return (), keywords.value("items") if "items" in schema else ANYTHING
    others = "additionalItems" if listed == "items" else "items"
    length = len(keywords.expect(listed, list)) if listed in schema else 0
    first = tuple(keywords.value(listed, number) for number in range(length))
    return first, keywords.value(others) if others in schema else ANYTHING


def _not_items(keywords: Keywords, keyword: str) -> Clause:
    first, rest = _array(keywords)
    if keyword != ("items" if "items" in keywords.schema else "prefixItems"):
        return ()
    found: list[Conjunction] = []
    for number, value in enumerate(first):
        for literal in value:
            wrong = (ANYTHING,) * number + (frozenset({literal ^ 1}),)
            found.append((_wrong_item(number, wrong),))
    for literal in rest:
        if keywords.document.schemas[literal // 2] is False:
            found.append((lambda facts: facts.only("array").with_lengths("array", fewest=len(first) + 1),))
        elif first:
            raise keywords.error(keyword, "the opposite of this keyword cannot be compiled")
        else:
            found.append((partial(Facts.with_some_item, value=frozenset({literal ^ 1})),))
    return tuple(found)


def _wrong_item(number: int, first: tuple[Value, ...]) -> Fact:
    def add(facts: Facts) -> Facts:
        facts = facts.only("array").with_lengths("array", fewest=number + 1)
        return replace(facts, array=facts.array.also(first, ANYTHING))

    return add


def _members(keywords: Keywords, keyword: str) -> list[Clause]:
    keywords.expect(keyword, *((dict,) if keyword != "additionalProperties" else (dict, bool)))
    if keyword == "additionalProperties" and keywords.value(keyword) == ANYTHING:
        return []
    return _fact(_object(nodes=frozenset({keywords.node})))


def _not_members(keywords: Keywords, keyword: str) -> Clause:
    if keyword == "properties":
        members = [(key, keywords.value(keyword, key)) for key in keywords.expect(keyword, dict)]
        needed = keywords.needed_members()  # their opposite: if the key is there, its value is wrong
        return tuple(
            (_is_object(required=frozenset({key}) - needed, members=frozenset({(key, literal ^ 1)})),)
            for key, value in members
            for literal in value
        )
    if keyword == "additionalProperties":
        value = keywords.value(keyword)
        if value == ANYTHING:
            return ()
        if all(keywords.document.schemas[literal // 2] is False for literal in value):
            return ((_is_object(outside=frozenset({keywords.node})),),)
    elif not keywords.expect(keyword, dict):
        return ()
    raise keywords.error(keyword, "the opposite of this keyword cannot be compiled")


def _required(keywords: Keywords, keyword: str) -> list[Clause]:
    if isinstance(keywords.schema[keyword], bool):
        return []  # draft 3
    return _fact(_object(required=frozenset(keywords.texts(keywords.schema[keyword], keyword))))


def _not_required(keywords: Keywords, keyword: str) -> Clause:
    if isinstance(keywords.schema[keyword], bool):
        return ()
    keys = keywords.texts(keywords.schema[keyword], keyword)
    needed = keywords.needed_members()  # that they may be missing, the opposite of properties says
    return tuple((_is_object(forbidden=frozenset({key})),) for key in keys if key not in needed)


def _dependents(keywords: Keywords, keyword: str) -> list[Clause]:
    clauses: list[Clause] = []
    for key, found in keywords.expect(keyword, dict).items():
        if isinstance(found, (dict, bool)):
            holds = (_is_object(required=frozenset({key})), keywords.literal(keyword, key))
            clauses.append(((_object(forbidden=frozenset({key})),), holds))
        else:
            keys = keywords.texts([found] if isinstance(found, str) else found, keyword)
            clauses += _fact(_object(dependents=frozenset({(key, frozenset(keys))})))
    return clauses


def _not_dependents(keywords: Keywords, keyword: str) -> Clause:
    found: list[Conjunction] = []
    for key, needed in keywords.expect(keyword, dict).items():
        if isinstance(needed, (dict, bool)):
            found.append((_is_object(required=frozenset({key})), keywords.literal(keyword, key, holds=False)))
        else:
            keys = keywords.texts([needed] if isinstance(needed, str) else needed, keyword)
            found += [(_is_object(required=frozenset({key}), forbidden=frozenset({other})),) for other in keys]
    return tuple(found)


def _names(keywords: Keywords, keyword: str) -> list[Clause]:
    value = keywords.value(keyword)
    return _fact(_object(names=value)) if value else []


def _refused(keywords: Keywords, keyword: str) -> Clause:
    raise keywords.error(keyword, "the opposite of this keyword cannot be compiled")


Stated = Callable[[Keywords, str], list[Clause]]
Denied = Callable[[Keywords, str], Clause]

KEYWORDS: dict[str, tuple[Stated, Denied]] = {
    "type": (
        lambda keywords, _: _fact(lambda facts: facts.typed(keywords.types())),
        lambda keywords, _: ((lambda facts: facts.not_typed(keywords.types()),),),
    ),
    "$ref": (
        lambda keywords, _: [((keywords.reference(),),)],
        lambda keywords, _: ((keywords.reference() ^ 1,),),
    ),
    "enum": (_enum, _not_enum),
    "const": (_enum, _not_enum),
    "allOf": (
        lambda keywords, keyword: [((literal,),) for literal in keywords.literals(keyword)],
        lambda keywords, keyword: tuple((literal,) for literal in keywords.literals(keyword, holds=False)),
    ),
    "anyOf": (
        lambda keywords, keyword: [tuple((literal,) for literal in keywords.literals(keyword))],
        lambda keywords, keyword: (tuple(keywords.literals(keyword, holds=False)),),
    ),
    "oneOf": (_one_of, _not_one_of),
    "not": (
        lambda keywords, keyword: [((keywords.literal(keyword, holds=False),),)],
        lambda keywords, keyword: ((keywords.literal(keyword),),),
    ),
    "if": (_if, _not_if),
    **dict.fromkeys(BOUNDS, (_bounded, _not_bounded)),
    "multipleOf": (_multiple, _refused),
    **dict.fromkeys(LENGTHS, (_length, _not_length)),
    "pattern": (_text(True), _text(False)),
    "format": (_text(True), _text(False)),
    "items": (_items, _not_items),
    "prefixItems": (_items, _not_items),
    **dict.fromkeys(OBJECT_KEYWORDS, (_members, _not_members)),
    "required": (_required, _not_required),
    "dependencies": (_dependents, _not_dependents),
    "dependentRequired": (_dependents, _not_dependents),
    "propertyNames": (_names, _refused),
}


def possible_types(document: SchemaDocument, node: int, depth: int = 8) -> frozenset[str]:
    """Types among which are those of all values that satisfy a node, as far as its plainest keywords tell."""
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
