"""Rules of arrays in which no two items are equal. Introduced in phase 12.

The frame's register has a bit for each possible value of an item. An item sets its bit at the next comma, and is
refused as soon as no unseen value continues its text. Unlisted texts, and lists that are too long, share bits according
to a checksum of their bytes: two texts with different checksums certainly differ. So a second text with the same
checksum is refused even though it may be different, which affects one text in 61. Strings have one spelling, so equal
items have equal bits. Objects, arrays and unlisted numbers are not tracked, so an array has at most one of each.

Invariant: an item begins only if an unseen value can be spelled.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from shared.grammar.automata.assembler import ClauseRow, Entries, Rule, sum_bits
from shared.grammar.automata.automaton import REFUSED
from shared.grammar.automata.dfa import DFA
from shared.grammar.documents.arrays import ArrayRule
from shared.grammar.documents.clauses import ALWAYS
from shared.grammar.documents.rules import Guards, ValueSource, blanks
from shared.grammar.documents.texts import spell
from shared.grammar.schema.facts import exact
from shared.grammar.schema.members import SUM_SHIFT, with_sums
from shared.grammar.schema.shapes import Array, Literal, Number, Object, String, Value

MOST_VALUES = 62
PRIMES = (61, 53, 43, 31, 23, 13, 7)
"""Number of distinct checksums: as many as there are bits for, and as keep the number of states small."""
MOST_STATES = 3000
KINDS = {"array": Array, "object": Object, "number": Number}
LITERALS = {"null": None, "true": True, "false": False}


def array_rule(values: ValueSource, groups: tuple[tuple[Array, ...], ...]) -> Rule:
    """The rule of some groups of arrays. Raises GrammarError if unique items cannot be tracked. Arrays with unique
    items are left out if there are other arrays.
    """
    most = values.members.most_items
    shapes = [shape for group in groups for shape in group]
    if not any(shape.is_unique and most(shape) > 1 for shape in shapes):
        return ArrayRule(values, groups)
    if len(shapes) == 1:
        return UniqueRule(values, shapes[0])
    others = tuple(tuple(s for s in group if not s.is_unique or most(s) <= 1) for group in groups)
    if not any(others):
        raise _error(values, "two arrays with unique items are possible at once")
    return ArrayRule(values, others)


def _error(values: ValueSource, reason: str) -> Exception:
    document = values.members.document
    return document.error(document.places.get(("uniqueItems", ""), "#"), reason)


class UniqueRule(Rule):
    """The rule of one array."""

    def __init__(self, values: ValueSource, shape: Array) -> None:
        super().__init__(values.assembler)
        if shape.first or shape.some:
            raise _error(values, "unique items cannot be combined with prefixItems or a negated items")
        self.values, self.shape, self.most = values, shape, values.members.most_items(shape)
        shapes = values.members.shapes(shape.rest)
        self.assembler.budget.spend(MOST_VALUES * (1 + len(shapes)))
        texts = tuple(one for one in shapes if isinstance(one, String))
        listed = {text for one in texts for text in one.values or ()}
        is_listed = all(one.values is not None for one in texts) and len(listed) <= MOST_VALUES // 2
        found: list[Value] = []
        for one in shapes:
            if isinstance(one, Literal):
                found.append(self._constant(LITERALS[one.text]))
            elif isinstance(one, Number) and one.values is not None:
                found += [self._constant(self._number(value)) for value in sorted(one.values)]
        if is_listed:
            known = [(text, spell(text)) for text in sorted(listed)]
            dfas = [values.texts.dfa(one) for one in texts]
            found += [
                self._constant(text)
                for text, spelled in known
                if spelled is not None and any(dfa.run(spelled) for dfa in dfas)
            ]
        self.listed = tuple(dict.fromkeys(found))
        kinds = {kind for kind, types in KINDS.items() for one in shapes if isinstance(one, types)}
        numbers = [one.values for one in shapes if isinstance(one, Number)]
        if None not in numbers:
            kinds -= {"number"}
        elif len(numbers) > 1:
            raise _error(values, "unique items cannot be listed numbers and others")
        self.others = tuple(shape.rest | self._typed(kind) for kind in sorted(kinds))
        if len(self.listed) > MOST_VALUES:
            raise _error(values, f"unique items may have at most {MOST_VALUES} values, and strings")
        self.all = (1 << len(self.listed)) - 1
        self.dfa: DFA | None = None
        if texts and not is_listed:
            self.dfa = self._by_sum(values.texts.group(texts))
            self.all |= int(np.bitwise_or.reduce(self.dfa.accepts)) << len(self.listed)
        num_items = self.all.bit_count() + len(self.others)
        if shape.fewest > num_items:
            raise _error(values, f"only {num_items} unique items can be told apart; minItems wants more")
        self.first = self._state("open", 0, (1 << len(self.others)) - 1)

    def _constant(self, value: object) -> Value:
        return frozenset({self.values.members.document.literal({"const": value}, "#")})

    def _typed(self, kind: str) -> Value:
        return frozenset({self.values.members.document.literal({"type": kind}, "#")})

    def _number(self, value: Fraction) -> int | float:
        number = float(value) if value.denominator > 1 else int(value)
        if exact(number) != value:
            raise _error(self.values, f"{number} cannot be compared exactly, so it is no unique item")
        return number

    def _by_sum(self, dfa: DFA) -> DFA:
        """The automaton extended with one bit for each checksum."""
        possible = [prime for prime in PRIMES if prime <= MOST_VALUES - len(self.listed) + 1]
        if not possible:
            raise _error(
                self.values, f"unique items may have at most {MOST_VALUES + 1 - PRIMES[-1]} values beside strings"
            )
        count = next((prime for prime in possible if prime * len(dfa) <= MOST_STATES), possible[-1])
        summed = with_sums(dfa, count, self.assembler.budget)
        bits = np.left_shift(1, summed.accepts >> SUM_SHIFT, dtype=np.int64)
        return DFA(summed.columns, summed.next, np.where(summed.accepts == 0, 0, bits))

    def _state(self, part: str, bit: int, left: int) -> int:
        """``left`` holds, as bits, the kinds of ``others`` that have had no item yet."""
        build = {"open": self._open, "item": self._item, "after": self._after}[part]
        return self.assembler.state((id(self), part, bit, left), lambda: build(bit, left))

    def _open(self, bit: int, left: int) -> Entries:
        return self._item(bit, left, "open") | ({} if self.shape.fewest else self._close(0, left))

    def _item(self, bit: int, left: int, part: str = "item") -> Entries:
        """Before an item."""
        entries: Entries = {}
        wanted = [number for number in range(len(self.others)) if left >> number & 1]
        if self.listed or wanted:
            size = len(self.listed)
            dead = tuple(1 << number for number in range(size))
            is_opened = (False,) * size + (True,) * len(wanted)
            guards = Guards(dead + (0,) * len(wanted), is_opened, is_spelled=True)
            values = *self.listed, *(self.others[number] for number in wanted)
            after = AfterItem(
                self, left, (*dead, *(0 for _ in wanted)), (*(0 for _ in dead), *(1 << n for n in wanted))
            )
            entries |= self.values.entries(values, after, guards)
        if self.dfa is not None:
            shift = len(self.listed)
            entries[ord('"')] = self.values.spelled(
                self.dfa,
                (id(self), left),
                lambda bits: bits << shift,
                lambda bits: self._state("after", bits << shift, left),
            )
        return entries | blanks(self._state(part, bit, left))

    def _after(self, bit: int, left: int) -> Entries:
        """After an item whose bit has not been set yet."""
        entries = self._close(bit, left) | blanks(self._state("after", bit, left))
        rows = *self._add(bit), (2, 0, self.all, max(self.most - self._num_others(left), 0), 0)
        if not left:
            rows = *rows, (1, self.all, 0, 1, 0)
        targets = REFUSED, self._state("item", 0, left), REFUSED, REFUSED
        entries[ord(",")] = self.assembler.choose(rows, targets)
        return entries

    def _num_others(self, left: int) -> int:
        return len(self.others) - left.bit_count()

    @staticmethod
    def _add(bit: int) -> tuple[ClauseRow, ...]:
        """Refuse a value that has been seen, including a number that could have continued; otherwise mark it as
        seen."""
        return ((1, bit, 0, 1, 0), (0, *ALWAYS, bit)) if bit else ()

    def _close(self, bit: int, left: int) -> Entries:
        colour = self.leave(0, (1,))
        fewest = max(self.shape.fewest - self._num_others(left), 0)
        return {ord("]"): self.assembler.pop(colour, (*self._add(bit), (1, 0, self.all, fewest, 0)))}

    def continued(self, bit: int, left: int) -> int:
        """The state after an item."""
        return self._state("after", bit, left)


@dataclass(frozen=True)
class AfterItem:
    """After an item: the bits of the listed values, and those of the others that are no longer allowed."""

    rule: UniqueRule
    left: int
    listed: tuple[int, ...]
    others: tuple[int, ...]

    def after(self, bits: int) -> int:
        return self.rule.continued(sum_bits(self.listed, bits), self.left & ~sum_bits(self.others, bits))
