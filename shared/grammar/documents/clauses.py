"""What objects need before they may close, as clauses over a register of their keys. Introduced in phase 12.

The register has a bit for each named key, as far as there are bits; keys that some alternative needs or counts come
first. Unnamed keys share bits according to the requirements they meet. If they must be counted, they are also
distinguished by a checksum of their bytes: keys with different bits certainly differ, so a repeated key counts only
once.
"""

from collections.abc import Iterable
from itertools import combinations
from math import comb

from shared.grammar.limits import Budget, GrammarError
from shared.grammar.schema.members import NUM_SUMS, SUM_SHIFT, Members, with_sums
from shared.grammar.schema.shapes import NEVER, Object, Value

REGISTER_BITS = 64
MAX_CLAUSES = 256
ALWAYS = (0, 0, 1)
"""Trigger, keys and minimum of a clause that is never satisfied."""
Clause = tuple[int, int, int]
"""(trigger, keys, least), as in ``Automaton.clauses``."""


class Requirements:
    """The register of a rule of objects, and the clauses of each of its alternatives.

    Attributes:
        allowed: for each alternative, its named keys and their values, including keys that only another alternative
            names.
        bits: the bit of each named key that is tracked.
        names: all keys that an alternative names.
        other_dfa: the automaton of the texts of keys, as in ``Members.other_names``, with their checksum from bit
            ``SUM_SHIFT`` on.
        others: for each alternative, whether it may have unnamed keys.
        num_bits: how many bits the keys may take; the last ``reserved`` ones are left to the rule.
    """

    def __init__(self, members: Members, shapes: list[Object], reserved: int = 0) -> None:
        self.members, self.shapes = members, shapes
        self.num_bits = REGISTER_BITS - reserved
        needs = [members.needed(shape) for shape in shapes]
        if len(frozenset().union(*needs)) > REGISTER_BITS:
            raise GrammarError(f"Objects that are alive at once need more than {REGISTER_BITS} named keys.")
        self.names = list(dict.fromkeys(key for shape in shapes for key in members.named(shape)))
        self.allowed = [members.allowed(shape, self.names) for shape in shapes]
        dfa, self.kinds = members.other_names(shapes)
        self._is_counted = [shape.fewest > len(need) for shape, need in zip(shapes, needs, strict=True)]
        missing = max((s.fewest - len(n) for s, n in zip(shapes, needs, strict=True)), default=0)
        self.num_sums = NUM_SUMS if missing > 1 else 1
        self.other_dfa = with_sums(dfa, self.num_sums, members.document.budget)
        self._values: dict[tuple[int, int], Value | None] = {}
        classes = self.classes = set(self.other_dfa.accepts.tolist()) - {0}
        self.others = [any(self.other_value(n, bits) is not None for bits in classes) for n in range(len(shapes))]
        self._other_bits: dict[tuple[frozenset[int], int], int] = {}
        self._assign(needs, classes)
        self.clauses = [tuple(self._clauses(number)) for number in range(len(shapes))]

    def _assign(self, needs: list[frozenset[str]], classes: set[int]) -> None:
        """Assign bits to keys."""
        is_used = any(self._is_counted) or any(shape.outside for shape in self.shapes)
        uses = {self._use(bits) for bits in classes} if is_used and any(self.others) else set()
        self._other_bits = {
            use: number for number, use in enumerate(sorted(uses, key=lambda use: (sorted(use[0]), use[1])))
        }
        wanted = dict.fromkeys(key for need in needs for key in sorted(need))
        for shape, is_counted in zip(self.shapes, self._is_counted, strict=True):
            for key, keys in sorted((key, sorted(keys)) for key, keys in shape.dependents):
                wanted.update(dict.fromkeys([key, *keys]))
            if is_counted or shape.judges:
                wanted.update(dict.fromkeys(self.names))
        start = len(self._other_bits)
        if start + len(wanted) > self.num_bits:
            raise GrammarError(f"An object needs or counts more than {self.num_bits - start} named keys.")
        tracked = list(dict.fromkeys([*wanted, *self.names]))[: self.num_bits - start]
        self.bits = {key: 1 << start + number for number, key in enumerate(tracked)}

    def _use(self, bits: int) -> tuple[frozenset[int], int]:
        """What an unnamed key satisfies: nodes that it is outside of, and its checksum."""
        matched = self.matched(bits)
        nodes = {node for shape in self.shapes for node in shape.outside}
        return frozenset(node for node in nodes if self.members.is_outside(node, None, matched)), bits >> SUM_SHIFT

    def matched(self, bits: int) -> frozenset[str]:
        """The patterns that an unnamed key matches."""
        return frozenset(kind for kind, bit in self.kinds.items() if isinstance(kind, str) and bits & bit)

    def other_bit(self, bits: int) -> int:
        """The register bit of an unnamed key; 0 if it has none."""
        number = self._other_bits.get(self._use(bits)) if self._other_bits else None
        return 0 if number is None else 1 << number

    def other_value(self, number: int, bits: int) -> Value | None:
        """The value of an unnamed key in an alternative; None if it may not have the key."""
        bits &= (1 << SUM_SHIFT) - 1
        if (number, bits) not in self._values:
            value = self.members.member(self.shapes[number], None, self.matched(bits))
            is_allowed = bits & self.kinds[self.shapes[number].names] and self.members.depth(value) < NEVER
            self._values[number, bits] = value if is_allowed else None
        return self._values[number, bits]

    def _mask(self, keys: Iterable[str]) -> int:
        return sum(self.bits[key] for key in set(keys))

    def _clauses(self, number: int) -> Iterable[Clause]:
        shape, allowed = self.shapes[number], self.allowed[number]
        needed = self.members.needed(shape)
        if needed:
            yield 0, self._mask(needed), len(needed)
        for key, keys in sorted((key, sorted(keys)) for key, keys in shape.dependents):
            missing = set(keys) - needed
            if key in allowed and key not in needed and missing:
                yield self.bits[key], self._mask(missing), len(missing)
        uses = [(bits, self.other_bit(bits)) for bits in self.classes if self.other_value(number, bits) is not None]
        if self._is_counted[number]:
            mask = self._mask(allowed)
            for _, bit in uses:
                mask |= bit
            yield 0, mask, shape.fewest
        for node in sorted(shape.outside):
            self.members.document.budget.spend(2 * len(allowed))
            names = [k for k in allowed if self.members.is_outside(node, k, self.members.matches(shape, k))]
            mask = self._mask(names)
            for bits, bit in uses:
                mask |= bit if node in self._use(bits)[0] else 0
            yield 0, mask, 1


def any_of(choices: list[tuple[Clause, ...]], budget: Budget) -> tuple[Clause, ...]:
    """The clauses of a group that ends if any of its alternatives can: their disjunction, in conjunctive form.
    Raises GrammarError if it is too large.
    """
    distinct = list(dict.fromkeys(choices))
    if not all(distinct):
        return ()
    if len(distinct) == 1:
        return distinct[0]
    found = {(0, 0)}  # (trigger, keys) of the clauses that need one key
    for choice in distinct:
        singles = [single for clause in choice for single in _singles(clause)]
        budget.spend(len(found) * len(singles))
        merged = {(trigger | t, keys | k) for trigger, keys in found for t, k in singles}
        found = _without_implied({(t, k) for t, k in merged if not t & k}, budget)
        if not found:
            return ()
    return tuple((trigger, keys, 1) for trigger, keys in sorted(found))


def _singles(clause: Clause) -> list[tuple[int, int]]:
    """A clause as several clauses that need one key each: at least m of n keys means at least one of any n - m + 1."""
    trigger, keys, least = clause
    bits = [1 << number for number in range(keys.bit_length()) if keys >> number & 1]
    size = len(bits) - least + 1
    if comb(len(bits), size) > MAX_CLAUSES:
        raise GrammarError("The schema has too many objects alive at once that count their keys.")
    return [(trigger, sum(some)) for some in combinations(bits, size)]


def _without_implied(found: set[tuple[int, int]], budget: Budget) -> set[tuple[int, int]]:
    """The clauses without those that a stronger clause implies."""
    if len(found) > MAX_CLAUSES**2:
        raise GrammarError("The schema has too many objects alive at once that differ in their required keys.")
    kept: list[tuple[int, int]] = []
    for trigger, keys in sorted(found, key=lambda one: (one[0].bit_count() + one[1].bit_count(), one)):
        budget.spend(1 + len(kept) // 8)
        if not any(t & trigger == t and k & keys == k for t, k in kept):
            kept.append((trigger, keys))
        if len(kept) > MAX_CLAUSES:
            raise GrammarError("The schema has too many objects alive at once that differ in their required keys.")
    return set(kept)
