"""Rules of arrays: their states record the live alternatives, and how many items each has had. Introduced in phase
12."""

from dataclasses import dataclass
from itertools import combinations

from shared.grammar.automata.assembler import Entries, Rule
from shared.grammar.automata.automaton import UNBOUNDED, Action, entry
from shared.grammar.documents.rules import ValueSource, blanks
from shared.grammar.schema.shapes import Array, Value

Alive = tuple[tuple[int, int, frozenset[Value]], ...]
"""(alternative, its number of items as far as it matters, what some item must still satisfy)."""


class ArrayRule(Rule):
    """The rule of some groups of arrays."""

    def __init__(self, values: ValueSource, groups: tuple[tuple[Array, ...], ...]) -> None:
        super().__init__(values.assembler)
        self.values = values
        self.alternatives = [(number, shape) for number, group in enumerate(groups) for shape in group]
        self.most = [values.members.most_items(shape) for _, shape in self.alternatives]
        self.first = self._state("open", tuple((n, 0, shape.some) for n, (_, shape) in enumerate(self.alternatives)))

    def _state(self, part: str, alive: Alive) -> int:
        build = {"open": self._open, "item": self._item, "after": self._after}[part]
        self.assembler.budget.spend(1 + len(alive))
        return self.assembler.state((id(self), part, alive), lambda: build(alive))

    def _open(self, alive: Alive) -> Entries:
        return self._item(alive, "open") | self._close(alive)

    def _item(self, alive: Alive, part: str = "item") -> Entries:
        """Before an item."""
        self.assembler.budget.spend(sum(6 << len(some) for _, _, some in alive))
        wanted = []
        for number, count, some in alive:
            shape = self.alternatives[number][1]
            for size in range(len(some) + 1):
                for found in map(frozenset, combinations(some, size)):
                    if max(count + 1, len(shape.first) if some - found else 0) + len(some - found) <= self.most[number]:
                        wanted.append((number, count, some - found, shape.item(count).union(*found)))
        groups: dict[Value, int] = {}
        followers = tuple((n, count, some, groups.setdefault(value, len(groups))) for n, count, some, value in wanted)
        distinct = tuple(groups)
        entries = self.values.entries(distinct, AfterItem(self, followers)) if distinct else {}
        return entries | blanks(self._state(part, alive))

    def _after(self, alive: Alive) -> Entries:
        """After an item."""
        entries = self._close(alive) | blanks(self._state("after", alive))
        growing = tuple(each for each in alive if each[1] < self.most[each[0]])
        if growing:
            entries[ord(",")] = entry(Action.GOTO, self._state("item", growing))
        return entries

    def _close(self, alive: Alive) -> Entries:
        bits = 0
        for number, count, some in alive:
            group, shape = self.alternatives[number]
            bits |= (count >= shape.fewest and not some) << group
        return {ord("]"): self.assembler.pop(self.leave(bits))} if bits else {}

    def follow(self, number: int, count: int) -> int:
        """The number of items plus one; it stops counting once the number no longer matters."""
        shape = self.alternatives[number][1]
        last = max(len(shape.first), shape.fewest) if self.most[number] == UNBOUNDED else self.most[number]
        return min(count + 1, last)

    def after(self, alive: Alive) -> int:
        return self._state("after", alive)


@dataclass(frozen=True)
class AfterItem:
    """After an item: (alternative, items before this one, requirements that some item must still meet, this item's
    group)."""

    rule: ArrayRule
    followers: tuple[tuple[int, int, frozenset[Value], int], ...]

    def after(self, bits: int) -> int:
        self.rule.assembler.budget.spend(1 + len(self.followers))
        found = [(n, self.rule.follow(n, count), some) for n, count, some, group in self.followers if bits >> group & 1]
        return self.rule.after(tuple(dict.fromkeys(found)))
