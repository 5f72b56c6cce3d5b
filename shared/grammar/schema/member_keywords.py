"""The keywords of the items of arrays and the members of objects. Introduced in phase 12.

Invariant: clauses say exactly what the keyword says, for values of every type.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from shared.grammar.schema.facts import Facts
from shared.grammar.schema.keywords import Clause, Conjunction, Fact, Keywords, say
from shared.grammar.schema.shapes import ANYTHING, Value, Wrong

OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")


def say_of_object(**sets: Any) -> Fact:
    return lambda facts: facts.with_object(**sets)


def is_object(**sets: Any) -> Fact:
    return lambda facts: facts.only("object").with_object(**sets)


def items(keywords: Keywords, keyword: str) -> list[Clause]:
    first, rest = _array(keywords)
    if keyword != ("items" if "items" in keywords.schema else "prefixItems"):
        return []  # read together with the other one
    return say(lambda facts: replace(facts, array=facts.array.also(first, rest)))


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


def unique(keywords: Keywords, keyword: str) -> list[Clause]:
    if not keywords.expect(keyword, bool):
        return []
    places, path = keywords.document.places, keywords.path(keyword)
    places[keyword, ""] = path if places.get((keyword, ""), path) == path else "#"
    return say(lambda facts: replace(facts, array=replace(facts.array, is_unique=True)))


def not_items(keywords: Keywords, keyword: str) -> Clause:
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


def members(keywords: Keywords, keyword: str) -> list[Clause]:
    keywords.expect(keyword, *((dict,) if keyword != "additionalProperties" else (dict, bool)))
    if keyword == "additionalProperties" and keywords.value(keyword) == ANYTHING:
        return []
    return say(say_of_object(nodes=frozenset({keywords.node})))


def not_members(keywords: Keywords, keyword: str) -> Clause:
    if keyword == "properties":
        members = [(key, keywords.value(keyword, key)) for key in keywords.expect(keyword, dict)]
        needed = keywords.needed_members()  # their negation: if the key is present, its value is wrong
        return tuple(
            (is_object(required=frozenset({key}) - needed, members=frozenset({(key, literal ^ 1)})),)
            for key, value in members
            for literal in value
        )
    if keyword == "additionalProperties":
        value = keywords.value(keyword)
        if all(keywords.document.schemas[literal // 2] is False for literal in value) and value:
            return ((is_object(outside=frozenset({keywords.node})),),)
        wrong = [Wrong(keywords.node, None, literal ^ 1) for literal in value]
    else:
        patterns = keywords.expect(keyword, dict)
        values = [(pattern, keywords.value(keyword, pattern)) for pattern in patterns]
        wrong = [Wrong(keywords.node, pattern, literal ^ 1) for pattern, value in values for literal in value]
    return tuple((is_object(wrong=frozenset({one})),) for one in wrong)


def not_tagged(keywords: Keywords, key: str) -> Conjunction:
    """A key of ``properties`` is wrong, as the negation of ``properties`` requires."""
    needed = frozenset({key}) - keywords.needed_members()
    wrong = keywords.literal("properties", key, holds=False)
    return (is_object(required=needed, members=frozenset({(key, wrong)})),)


def tagged(keywords: Keywords, key: str) -> Fact:
    """The negation of ``not_tagged``, for an object."""
    needed = frozenset({key}) & keywords.needed_members()
    return say_of_object(required=needed, members=frozenset({(key, keywords.literal("properties", key))}))


def required(keywords: Keywords, keyword: str) -> list[Clause]:
    if isinstance(keywords.schema[keyword], bool):
        return []  # draft 3
    return say(say_of_object(required=frozenset(keywords.texts(keywords.schema[keyword], keyword))))


def not_required(keywords: Keywords, keyword: str) -> Clause:
    if isinstance(keywords.schema[keyword], bool):
        return ()
    keys = keywords.texts(keywords.schema[keyword], keyword)
    needed = keywords.needed_members()  # the negation of properties says that they may be missing
    return tuple((is_object(forbidden=frozenset({key})),) for key in keys if key not in needed)


def dependents(keywords: Keywords, keyword: str) -> list[Clause]:
    clauses: list[Clause] = []
    for key, found in keywords.expect(keyword, dict).items():
        if isinstance(found, (dict, bool)):
            holds = (is_object(required=frozenset({key})), keywords.literal(keyword, key))
            clauses.append(((say_of_object(forbidden=frozenset({key})),), holds))
        else:
            keys = keywords.texts([found] if isinstance(found, str) else found, keyword)
            clauses += say(say_of_object(dependents=frozenset({(key, frozenset(keys))})))
    return clauses


def not_dependents(keywords: Keywords, keyword: str) -> Clause:
    found: list[Conjunction] = []
    for key, needed in keywords.expect(keyword, dict).items():
        if isinstance(needed, (dict, bool)):
            found.append((is_object(required=frozenset({key})), keywords.literal(keyword, key, holds=False)))
        else:
            keys = keywords.texts([needed] if isinstance(needed, str) else needed, keyword)
            found += [(is_object(required=frozenset({key}), forbidden=frozenset({other})),) for other in keys]
    return tuple(found)


def names(keywords: Keywords, keyword: str) -> list[Clause]:
    value = keywords.value(keyword)
    return say(say_of_object(names=value)) if value else []
