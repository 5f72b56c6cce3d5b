"""A conjunction of JSON schemas, as a union of shapes. Introduced in phase 12.

Clauses (``anyOf``, ``oneOf``, ``if``, the negation of a conjunction) branch, and everything else adds a fact to its
branch. Each finished branch gives one shape for each type. ``oneOf`` takes each alternative minus the others that it
overlaps.

Before a branch divides, it drops the alternatives that its facts exclude, and the clauses with an alternative that they
imply (``implications``). So twenty tags give twenty branches, not a million.

Invariant: the union of the shapes is exactly what the conjunction accepts.
"""

from collections.abc import Iterator

from shared.grammar.schema.document import SchemaDocument
from shared.grammar.schema.facts import Facts
from shared.grammar.schema.implications import Implications, Known
from shared.grammar.schema.keywords import Clause, Keywords, possible_types
from shared.grammar.schema.logic import denied, stated
from shared.grammar.schema.shapes import NEVER, Shape, Value

MAX_BRANCHES = 2048


class Unresolved(Exception):  # noqa: N818 (no error: the caller does without)
    """A value was requested while it was being resolved."""


class Disjuncts:
    """The shapes of the values of one document, resolved on request."""

    def __init__(self, document: SchemaDocument, parts: Known) -> None:
        self.document, self.parts = document, parts
        self.implications = Implications(document, parts, self.clauses)
        self._shapes: dict[Value, tuple[Shape, ...] | None] = {}
        self._checked: set[int] = set()
        self._clauses: dict[int, list[Clause]] = {}

    def shapes(self, value: Value) -> tuple[Shape, ...]:
        """The shapes of a value; none if single facts show that nothing satisfies it. Raises Unresolved if the value is
        part of its own logic and is currently being resolved.
        """
        if value in self._shapes:
            found = self._shapes[value]
            if found is None:
                raise Unresolved
            return found
        self.document.budget.spend(10)
        self._shapes[value] = None
        shapes: dict[Shape, None] = {}
        try:
            branches = self._branches([((literal,),) for literal in sorted(value)], Facts(), frozenset())
            for count, facts in enumerate(branches):
                self.document.budget.spend(4 + 2 * facts.size)
                shapes.update(dict.fromkeys(facts.shapes()))
                if count == MAX_BRANCHES:
                    path = self.document.paths[min(value) // 2]
                    raise self.document.error(path, f"the schema has more than {MAX_BRANCHES} combined alternatives")
        except BaseException:
            del self._shapes[value]
            raise
        self._shapes[value] = tuple(shapes)
        return self._shapes[value] or ()

    def _branches(self, pending: list[Clause], facts: Facts, seen: frozenset[int]) -> Iterator[Facts]:
        """The facts of all branches in which every pending clause has an alternative that holds."""
        self.document.budget.spend(2 + len(pending) + len(seen) // 8)
        choices: list[Clause] = []
        pending = pending[::-1]
        while pending:
            clause = pending.pop()
            if len(clause) != 1:
                choices.append(clause)
            else:
                self.document.budget.spend(2)
                for item in clause[0]:
                    if isinstance(item, int):
                        if item ^ 1 in seen:
                            return
                        if item not in seen:
                            self.document.budget.spend(2 + len(seen) // 8)
                            seen |= {item}
                            pending += reversed(self.clauses(item))
                    else:
                        self.document.budget.spend(facts.size)
                        facts = item(facts)
                        if not facts.types:
                            return
            if not pending and len(choices) > 1:
                choices = [self.implications.narrowed(each, facts, seen) for each in choices]
                pending = [each for each in choices if len(each) == 1]
                choices = [each for each in choices if len(each) != 1]
        if not choices:
            yield facts
            return
        choices.sort(key=len)
        for alternative in choices[0]:
            yield from self._branches([(alternative,), *choices[1:]], facts, seen)

    def clauses(self, literal: int) -> list[Clause]:
        """The clauses of a literal; one alternative of each must hold."""
        if literal not in self._clauses:
            self._check_references(literal // 2)
            keywords = Keywords(self.document, literal // 2, self._is_disjoint)
            self.document.budget.spend(8)
            self._clauses[literal] = denied(keywords) if literal % 2 else stated(keywords)
        return self._clauses[literal]

    def _check_references(self, node: int, chain: tuple[int, ...] = ()) -> None:
        """Refuse a schema that depends on itself because it refers to itself for the same value."""
        if node in chain:
            raise self.document.error(self.document.paths[node], "the schema refers to itself")
        if node not in self._checked:
            for other in Keywords(self.document, node, self._is_disjoint).parts():
                self.document.budget.spend(2 + len(chain) // 8)
                self._check_references(other // 2, (*chain, node))
            self._checked.add(node)

    def _is_disjoint(self, one: int, other: int) -> bool:
        """Whether it is known that nothing satisfies both literals."""
        types = [possible_types(self.document, literal // 2) for literal in (one, other)]
        return not types[0] & types[1] or self.parts.known_depth(frozenset({one, other})) >= NEVER
