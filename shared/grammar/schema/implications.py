"""What a branch's facts imply about an alternative not yet taken. Introduced in phase 12.

Most alternatives are distinguished by a tag: a key with a constant. Once a branch knows the tag, the other alternatives
cannot hold and their negations already do, so there is nothing to choose. Only values that contain no schemas are
compared, which is cheap and needs nothing that is being resolved.

Invariant: everything that is reported as excluded or implied is; some cases may be missed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from shared.grammar.limits import GrammarError, WorkError
from shared.grammar.schema.document import ANNOTATIONS, SchemaDocument
from shared.grammar.schema.facts import Facts
from shared.grammar.schema.keywords import Clause, Conjunction
from shared.grammar.schema.shapes import NEVER, Object, Value

PLAIN = ANNOTATIONS | {
    *("type", "enum", "const", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""Keywords of schemas that hold no others, and are cheap to compare."""


class Known(Protocol):
    """What is known about nested values; see :class:`shared.grammar.schema.members.Members`."""

    def known_depth(self, value: Value) -> int:
        """A value's minimum nesting depth; ``NEVER`` if it is certain that nothing satisfies the value."""

    def judged(self, shape: Object, key: str) -> Value:
        """What an object's schemas say about a key."""


class Implications:
    """Decides alternatives by facts. ``clauses`` gives a literal's clauses."""

    def __init__(self, document: SchemaDocument, known: Known, clauses: Callable[[int], list[Clause]]) -> None:
        self.document, self.known, self.clauses = document, known, clauses

    def narrowed(self, clause: Clause, facts: Facts, seen: frozenset[int]) -> Clause:
        """The alternatives of a clause that the facts do not exclude; a single one that adds nothing if the facts imply
        one."""
        found = []
        for alternative in clause:
            self.document.budget.spend(2 + len(alternative) + facts.size)
            after = self._after(alternative, facts, seen)
            if after is None:
                continue
            is_known = all(item in seen for item in alternative if isinstance(item, int))
            if is_known and self._is_implied(after, facts):
                return ((),)
            found.append(alternative)
        return tuple(found)

    def _after(self, alternative: Conjunction, facts: Facts, seen: frozenset[int]) -> Facts | None:
        """The facts extended by those that an alternative adds directly; None if it cannot hold."""
        before = facts
        for item in alternative:
            if not isinstance(item, int):
                facts = item(facts)
            elif item ^ 1 in seen:
                return None
            elif item not in seen:
                for clause in self._plain_clauses(item):
                    if not clause:
                        return None
                    for fact in clause[0]:
                        self.document.budget.spend(facts.size)
                        facts = facts if isinstance(fact, int) else fact(facts)
            if not facts.types:
                return None
        if "object" in facts.types and self._is_contradiction(facts.object, before.object):
            facts = facts.only(*(facts.types - {"object"}))
        return facts if facts.types else None

    def _plain_clauses(self, literal: int) -> list[Clause]:
        """The clauses of a literal that leave no choice; none if it cannot be compiled."""
        try:
            return [clause for clause in self.clauses(literal) if len(clause) < 2]
        except WorkError:
            raise
        except GrammarError:
            return []

    def _is_contradiction(self, shape: Object, before: Object) -> bool:
        """Whether an object requires a key that it may not have; ``before``, it did not."""
        if shape.required & shape.forbidden:
            return True
        keys = shape.required
        if shape.nodes == before.nodes:
            keys = (keys - before.required) | (keys & {key for key, _ in shape.members - before.members})
        return any(self._is_never(self.known.judged(shape, key)) for key in sorted(keys))

    def _is_implied(self, after: Facts, facts: Facts) -> bool:
        if after.types != facts.types or replace(after, object=facts.object) != facts:
            return False
        old, new = facts.object, after.object
        if "object" not in facts.types or old == new:
            return True
        if replace(new, required=old.required, members=old.members) != old or new.required != old.required:
            return False
        added = sorted(new.members - old.members)
        return all(self._is_never(self.known.judged(old, key) | {literal ^ 1}) for key, literal in added)

    def _is_never(self, value: Value) -> bool:
        """Whether nothing satisfies a value, judging only by those of its schemas that contain no others."""
        self.document.budget.spend(2 + len(value))
        plain = frozenset(literal for literal in value if self._plain(literal // 2))
        return bool(plain) and self.known.known_depth(plain) >= NEVER

    def _plain(self, node: int) -> bool:
        schema = self.document.schemas[node]
        return isinstance(schema, bool) or schema.keys() <= PLAIN
