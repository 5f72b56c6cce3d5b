"""What a schema requires, and what its negation requires: the table of all keywords. Introduced in phase 12.

The negation of a schema is one clause, whose alternatives are the negations of all its keywords (De Morgan); it is
refused if no shape can express the negation of some keyword. If an object has a tag (a key with listed values), the tag
is wrong in the first alternative and right in all others, so the negations of schemas with different tags do not
multiply. ``oneOf`` takes each alternative minus the others that it overlaps.
"""

from collections.abc import Callable
from typing import Any

from shared.grammar.schema import member_keywords as of_members
from shared.grammar.schema import scalar_keywords as of_scalars
from shared.grammar.schema.keywords import Clause, Keywords, refused, say

Stated = Callable[[Keywords, str], list[Clause]]
Denied = Callable[[Keywords, str], Clause]


def stated(keywords: Keywords) -> list[Clause]:
    """What a node requires."""
    schema = keywords.schema
    if isinstance(schema, bool):
        return [] if schema else [()]
    if "$ref" in schema and keywords.document.is_old:
        return [((keywords.reference(),),)]
    return [clause for keyword in schema if keyword in KEYWORDS for clause in KEYWORDS[keyword][0](keywords, keyword)]


def denied(keywords: Keywords) -> list[Clause]:
    """What the negation of a node requires."""
    schema = keywords.schema
    if isinstance(schema, bool):
        return [()] if schema else []
    if "$ref" in schema and keywords.document.is_old:
        return [((keywords.reference() ^ 1,),)]
    found = [KEYWORDS[keyword][1](keywords, keyword) for keyword in schema if keyword in KEYWORDS]
    clause = tuple(alternative for clause in found for alternative in clause)
    key = tag(schema)
    if key is None:
        return [clause]
    wrong, right = of_members.not_tagged(keywords, key), of_members.tagged(keywords, key)
    return [(wrong, *((*alternative, right) for alternative in clause))]


def tag(schema: Any) -> str | None:
    """The first key that a schema constrains by a list of values."""
    members = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(members, dict):
        return None
    return next(
        (key for key, value in members.items() if isinstance(value, dict) and {"const", "enum"} & value.keys()), None
    )


def one_of(keywords: Keywords, keyword: str) -> list[Clause]:
    literals = keywords.literals(keyword)
    clause = []
    for number, one in enumerate(literals):
        keywords.document.budget.spend(len(literals) // 4)
        others = literals[:number] + literals[number + 1 :]
        if one not in others:
            clause.append((one, *(other ^ 1 for other in others if not keywords.is_disjoint(one, other))))
    return [tuple(clause)]


def not_one_of(keywords: Keywords, keyword: str) -> Clause:
    literals = keywords.literals(keyword)
    keywords.document.budget.spend(len(literals) ** 2 // 2)
    pairs = [(one, other) for number, one in enumerate(literals) for other in literals[:number]]
    return (tuple(literal ^ 1 for literal in literals), *(pair for pair in pairs if not keywords.is_disjoint(*pair)))


def condition(keywords: Keywords, keyword: str) -> list[Clause]:
    schema, condition = keywords.schema, keywords.literal("if")
    then = (keywords.literal("then"),) if "then" in schema else ()
    other = (keywords.literal("else"),) if "else" in schema else ()
    return [((condition, *then), (condition ^ 1, *other))] if then or other else []


def not_if(keywords: Keywords, keyword: str) -> Clause:
    condition = keywords.literal("if")
    return tuple(
        (literal, keywords.literal(branch, holds=False))
        for literal, branch in ((condition, "then"), (condition ^ 1, "else"))
        if branch in keywords.schema
    )


KEYWORDS: dict[str, tuple[Stated, Denied]] = {
    "type": (
        lambda keywords, _: say(lambda facts: facts.typed(keywords.types())),
        lambda keywords, _: ((lambda facts: facts.not_typed(keywords.types()),),),
    ),
    "$ref": (lambda keywords, _: [((keywords.reference(),),)], lambda keywords, _: ((keywords.reference() ^ 1,),)),
    "enum": (of_scalars.enum, of_scalars.not_enum),
    "const": (of_scalars.enum, of_scalars.not_enum),
    "allOf": (
        lambda keywords, keyword: [((literal,),) for literal in keywords.literals(keyword)],
        lambda keywords, keyword: tuple((literal,) for literal in keywords.literals(keyword, holds=False)),
    ),
    "anyOf": (
        lambda keywords, keyword: [tuple((literal,) for literal in keywords.literals(keyword))],
        lambda keywords, keyword: (tuple(keywords.literals(keyword, holds=False)),),
    ),
    "oneOf": (one_of, not_one_of),
    "not": (
        lambda keywords, keyword: [((keywords.literal(keyword, holds=False),),)],
        lambda keywords, keyword: ((keywords.literal(keyword),),),
    ),
    "if": (condition, not_if),
    **dict.fromkeys(of_scalars.BOUNDS, (of_scalars.bounded, of_scalars.not_bounded)),
    "multipleOf": (of_scalars.multiple, refused),
    **dict.fromkeys(of_scalars.LENGTHS, (of_scalars.length, of_scalars.not_length)),
    "pattern": (of_scalars.text(True), of_scalars.text(False)),
    "format": (of_scalars.text(True), of_scalars.text(False)),
    "items": (of_members.items, of_members.not_items),
    "prefixItems": (of_members.items, of_members.not_items),
    "uniqueItems": (
        of_members.unique,
        lambda keywords, keyword: refused(keywords, keyword) if keywords.schema[keyword] else (),
    ),
    **dict.fromkeys(of_members.OBJECT_KEYWORDS, (of_members.members, of_members.not_members)),
    "required": (of_members.required, of_members.not_required),
    "dependencies": (of_members.dependents, of_members.not_dependents),
    "dependentRequired": (of_members.dependents, of_members.not_dependents),
    "propertyNames": (of_members.names, refused),
}
