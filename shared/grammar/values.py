"""What may stand where a value is wanted: the bytes with which it begins. Introduced in phase 12.

A value is wanted for one or more groups at a time, one for each alternative that is alive and
sees it differently. Objects, arrays and strings push the rule of their groups; numbers and literals are spelled out in
place, since only what follows them shows where they end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shared.grammar.arrays import ArrayRule
from shared.grammar.assembler import Assembler, Continuation, Entries, Rule
from shared.grammar.automaton import Action, entry
from shared.grammar.digits import machines
from shared.grammar.limits import Budget
from shared.grammar.machines import Machine
from shared.grammar.members import Members
from shared.grammar.objects import ObjectRule
from shared.grammar.schema_document import SchemaDocument
from shared.grammar.shapes import Array, Literal, Number, Object, Shape, String, Value
from shared.grammar.strings import Groups, StringRule
from shared.grammar.texts import Texts

Kind = TypeVar("Kind", Array, Object, String)


@dataclass(frozen=True)
class Mapped:
    """A continuation for the groups of one kind of value: bit i stands for the groups ``masks[i]``."""

    continuation: Continuation
    masks: tuple[int, ...]

    def after(self, bits: int) -> int:
        return self.continuation.after(sum_bits(self.masks, bits))


def sum_bits(masks: tuple[int, ...], bits: int) -> int:
    """The union of the masks that are chosen by bits."""
    found = 0
    for number, mask in enumerate(masks):
        found |= mask if bits >> number & 1 else 0
    return found


class Values:
    """The values of one document, and the rules that were made for them."""

    def __init__(self, document: SchemaDocument, budget: Budget) -> None:
        self.document, self.budget = document, budget
        self.assembler = Assembler(budget)
        self.texts = Texts(document)
        self.members = Members(document, self.texts)
        self._rules: dict[object, Rule] = {}

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation) -> Entries:
        """The bytes with which a value of any of the groups begins; the groups differ from each other."""
        groups = [self.members.shapes(value) for value in wanted]
        self.budget.spend(4 + sum(2 + 2 * len(group) for group in groups))
        entries = self._scalars(groups, continuation)
        if found := self._select(groups, String):
            entries[ord('"')] = self._string(*found, continuation)
        if arrays := self._select(groups, Array):
            entries[ord("[")] = self._push(ArrayRule, *arrays, continuation)
        if objects := self._select(groups, Object):
            entries[ord("{")] = self._push(ObjectRule, *objects, continuation)
        return entries

    @staticmethod
    def _select(
        groups: list[tuple[Shape, ...]], kind: type[Kind]
    ) -> tuple[tuple[tuple[Kind, ...], ...], tuple[int, ...]] | None:
        """The different groups of one kind, and for each, as bits, whose they are."""
        masks: dict[tuple[Kind, ...], int] = {}
        for number, group in enumerate(groups):
            if chosen := tuple(shape for shape in group if isinstance(shape, kind)):
                masks[chosen] = masks.get(chosen, 0) | 1 << number
        return (tuple(masks), tuple(masks.values())) if masks else None

    def _push(
        self,
        kind: Callable[..., Rule],
        groups: tuple[tuple[Kind, ...], ...],
        masks: tuple[int, ...],
        continuation: Continuation,
    ) -> int:
        rule = self._rules.get((kind, groups))
        if rule is None:
            rule = self._rules[kind, groups] = kind(self, groups)
        return self.assembler.push(rule, Mapped(continuation, masks))

    def _string(self, groups: Groups, masks: tuple[int, ...], continuation: Continuation) -> int:
        (shape, *others), is_single = groups[0], len(groups) == 1
        found = self.texts.counted(shape) if is_single and not others else None
        if found is None:
            return self._push(StringRule, groups, masks, continuation)
        key, counted = found
        if (StringRule, key) not in self._rules:
            self._rules[StringRule, key] = StringRule(self, groups, counted)
        rule = self._rules[StringRule, key]
        return self.assembler.push(rule, Mapped(continuation, masks), counted.fewest, counted.most)

    # Numbers and literals

    def _scalars(self, groups: list[tuple[Shape, ...]], continuation: Continuation) -> Entries:
        masks: dict[Number | Literal, int] = {}
        for number, group in enumerate(groups):
            for shape in group:
                if isinstance(shape, (Number, Literal)):
                    masks[shape] = masks.get(shape, 0) | 1 << number
        ordered = sorted(masks.items(), key=lambda one: self.members.number(one[0]))
        found = machines([shape for shape, _ in ordered], self.budget)
        parts = tuple((each, mask, 0) for each, (_, mask) in zip(found, ordered, strict=True))
        return self._read(parts, continuation)

    def _read(self, parts: tuple[tuple[Machine, int, int], ...], continuation: Continuation) -> Entries:
        """The bytes behind which some of the machines still run: (machine, its groups, its state)."""
        self.budget.spend(sum(1 + len(each.rows[state]) for each, _, state in parts))
        targets: dict[int, list[tuple[Machine, int, int]]] = {}
        for each, mask, state in parts:
            for byte, following in each.rows[state].items():
                targets.setdefault(byte, []).append((each, mask, following))
        return {byte: entry(Action.GOTO, self._scalar(tuple(found), continuation)) for byte, found in targets.items()}

    def _scalar(self, parts: tuple[tuple[Machine, int, int], ...], continuation: Continuation) -> int:
        """The state inside a number or a literal."""
        self.budget.spend(len(parts))
        bits = 0
        for each, mask, state in parts:
            bits |= mask if each.ends[state] else 0
        if bits and all(not each.rows[state] for each, _, state in parts):
            return continuation.after(bits)

        def build() -> Entries:
            loop, counted = entry(Action.GOTO, state), entry(Action.BLANK, state)
            found = self._read(parts, continuation)
            entries = {byte: counted if value == loop else value for byte, value in found.items()}
            if bits:
                following = continuation.after(bits)
                entries |= self.assembler.entries_of(following)
                if following in self.assembler.final:
                    self.assembler.final.add(state)
            return entries

        state = self.assembler.state((continuation, parts), build)
        return state
