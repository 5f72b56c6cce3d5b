"""Rules of arrays: the alternatives that are alive, and how many items each has had. Introduced in phase 12."""

from dataclasses import dataclass

from shared.grammar.assembler import Entries, Rule
from shared.grammar.automaton import UNBOUNDED, Action, entry
from shared.grammar.rules import BLANKS, Alive, ValueRules
from shared.grammar.shapes import Array


class ArrayRule(Rule):
    """The rule of some groups of arrays; of an alternative counts its items, as far as they matter."""

    def __init__(self, values: ValueRules, groups: tuple[frozenset[Array], ...]) -> None:
        super().__init__(values.assembler)
        self.values = values
        self.alternatives = [(number, shape) for number, group in enumerate(groups) for shape in group]
        self.most = [values.members.most_items(shape) for _, shape in self.alternatives]
        self.first = self._state("open", tuple((number, 0) for number in range(len(self.alternatives))))

    def _state(self, part: str, alive: Alive) -> int:
        build = {"open": self._open, "item": self._item, "after": self._after}[part]
        return self.assembler.state((id(self), part, alive), lambda: build(alive))

    def _open(self, alive: Alive) -> Entries:
        return self._item(alive, "open") | self._close(alive)

    def _item(self, alive: Alive, part: str = "item") -> Entries:
        """Before an item."""
        growing = [(number, count) for number, count in alive if count < self.most[number]]
        wanted = [self.alternatives[number][1].item(count) for number, count in growing]
        distinct = tuple(dict.fromkeys(wanted))
        followers = tuple(
            (number, count, distinct.index(value)) for (number, count), value in zip(growing, wanted, strict=True)
        )
        entries = self.values.entries(distinct, AfterItem(self, followers)) if distinct else {}
        return entries | dict.fromkeys(BLANKS, entry(Action.BLANK, self._state(part, alive)))

    def _after(self, alive: Alive) -> Entries:
        """Behind an item."""
        entries = self._close(alive) | dict.fromkeys(BLANKS, entry(Action.BLANK, self._state("after", alive)))
        growing = tuple((number, count) for number, count in alive if count < self.most[number])
        if growing:
            entries[ord(",")] = entry(Action.GOTO, self._state("item", growing))
        return entries

    def _close(self, alive: Alive) -> Entries:
        bits = 0
        for number, count in alive:
            group, shape = self.alternatives[number]
            bits |= (count >= shape.fewest) << group
        return {ord("]"): self.assembler.pop(self.leave(bits))} if bits else {}

    def follow(self, number: int, count: int) -> tuple[int, int]:
        """An alternative with one more item; counts that no longer matter stay."""
        shape = self.alternatives[number][1]
        last = max(len(shape.first), shape.fewest) if self.most[number] == UNBOUNDED else self.most[number]
        return number, min(count + 1, last)

    def after(self, alive: Alive) -> int:
        return self._state("after", alive)


@dataclass(frozen=True)
class AfterItem:
    """Behind an item: (alternative, items before, the group of its item)."""

    rule: ArrayRule
    followers: tuple[tuple[int, int, int], ...]

    def after(self, bits: int) -> int:
        return self.rule.after(
            tuple(self.rule.follow(n, count) for n, count, group in self.followers if bits >> group & 1)
        )
