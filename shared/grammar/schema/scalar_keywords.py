"""The keywords of numbers, strings and listed values, and those that only bound a length. Introduced in phase 12.

Invariant: clauses say exactly what the keyword says, for values of every type.
"""

from collections.abc import Callable
from typing import Any

from shared.grammar.patterns.long_repeats import as_length
from shared.grammar.schema.facts import exact
from shared.grammar.schema.keywords import Clause, Keywords, say

LENGTHS = {
    "minLength": ("string", "fewest"),
    "maxLength": ("string", "most"),
    "minItems": ("array", "fewest"),
    "maxItems": ("array", "most"),
    "minProperties": ("object", "fewest"),
    "maxProperties": ("object", "most"),
}
BOUNDS = {"minimum": "low", "exclusiveMinimum": "low", "maximum": "high", "exclusiveMaximum": "high"}


def enum(keywords: Keywords, keyword: str) -> list[Clause]:
    values = keywords.values(keyword)
    constants = keywords.document.constants(values, keywords.path(keyword))
    clause: Clause = tuple((literal,) for literal in constants)
    return [((lambda facts: facts.among(values),), *clause) if len(constants) < len(values) else clause]


def not_enum(keywords: Keywords, keyword: str) -> Clause:
    values = keywords.values(keyword)
    constants = keywords.document.constants(values, keywords.path(keyword))
    return ((lambda facts: facts.not_among(values), *(literal ^ 1 for literal in constants)),)


def _bound(keywords: Keywords, keyword: str) -> tuple[str, Any, bool] | None:
    """Which side a keyword bounds, at what value, and whether the bound itself is excluded (in draft 4 by a separate
    keyword)."""
    found = keywords.expect(keyword, int, float, bool)
    if isinstance(found, bool):
        return None
    old = keywords.schema.get("exclusiveM" + keyword[1:]) is True
    return BOUNDS[keyword], exact(found), keyword.startswith("exclusive") or old


def bounded(keywords: Keywords, keyword: str) -> list[Clause]:
    if not (bound := _bound(keywords, keyword)):
        return []
    side, value, is_excluded = bound
    return say(lambda facts: facts.with_bound(side, value, is_excluded))


def not_bounded(keywords: Keywords, keyword: str) -> Clause:
    if not (bound := _bound(keywords, keyword)):
        return ()
    side, value, is_excluded = bound
    other = "high" if side == "low" else "low"
    return ((lambda facts: facts.only("number").with_bound(other, value, not is_excluded),),)


def multiple(keywords: Keywords, keyword: str) -> list[Clause]:
    divisor = exact(keywords.expect(keyword, int, float))
    if divisor <= 0:
        raise keywords.error(keyword, f"a divisor is greater than 0, not {divisor!s:.50}")
    return say(lambda facts: facts.multiple_of(divisor))


def length(keywords: Keywords, keyword: str) -> list[Clause]:
    kind, side = LENGTHS[keyword]
    count = keywords.count(keyword)
    return say(lambda facts: facts.with_lengths(kind, **{side: count}))


def not_length(keywords: Keywords, keyword: str) -> Clause:
    kind, side = LENGTHS[keyword]
    count = keywords.count(keyword)
    if side == "fewest":
        return ((lambda facts: facts.only(kind).with_lengths(kind, most=count - 1),),) if count else ()
    return ((lambda facts: facts.only(kind).with_lengths(kind, fewest=count + 1),),)


def text(is_required: bool) -> Callable[[Keywords, str], Any]:
    def read(keywords: Keywords, keyword: str) -> Any:
        text = keywords.expect(keyword, str)
        found = frozenset({(text, is_required)})
        path = keywords.path(keyword)
        keywords.document.places.setdefault((keyword, text), path)
        found_length = as_length(text, keywords.document.budget) if keyword == "pattern" and is_required else None
        if found_length:
            shorter, fewest, most = found_length
            keywords.document.places.setdefault((keyword, shorter), path)
            texts = frozenset({(shorter, True)})
            return say(lambda facts: facts.with_texts(keyword, texts).with_lengths("string", fewest=fewest, most=most))
        if is_required:
            return say(lambda facts: facts.with_texts(keyword, found))
        return ((lambda facts: facts.only("string").with_texts(keyword, found),),)

    return read
