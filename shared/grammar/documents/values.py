"""What may follow where a value is expected: the bytes that begin a value. Introduced in phase 12.

A value is expected for one or more groups at once, one for each live alternative that treats it differently. Objects,
arrays and strings push the rule of their groups. Numbers and literals are spelled out inline, since only the next byte
shows where they end.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shared.grammar.automata.assembler import Assembler, Continuation, Entries, Rule, sum_bits
from shared.grammar.automata.automaton import Action, entry
from shared.grammar.automata.dfa import DEAD, DFA
from shared.grammar.automata.machines import Machine
from shared.grammar.automata.plain import ACTION_MASK
from shared.grammar.documents.masked_objects import object_rule
from shared.grammar.documents.rules import Guards
from shared.grammar.documents.strings import Groups, StringRule, ends_of, rows_of
from shared.grammar.documents.texts import Texts
from shared.grammar.documents.unique_arrays import array_rule
from shared.grammar.limits import Budget
from shared.grammar.numbers.digits import machines
from shared.grammar.schema.document import SchemaDocument
from shared.grammar.schema.members import Members
from shared.grammar.schema.shapes import Array, Literal, Number, Object, Shape, String, Value

Kind = TypeVar("Kind", Array, Object, String)


@dataclass(frozen=True)
class Mapped:
    """A continuation for the groups of one kind of value: bit i represents the groups ``masks[i]``."""

    continuation: Continuation
    masks: tuple[int, ...]

    def after(self, bits: int) -> int:
        return self.continuation.after(sum_bits(self.masks, bits))


class Values:
    """The values of one document, and the rules made for them."""

    def __init__(self, document: SchemaDocument, budget: Budget) -> None:
        self.document, self.budget = document, budget
        self.assembler = Assembler(budget)
        self.texts = Texts(document)
        self.members = Members(document, self.texts)
        self._rules: dict[object, Rule] = {}
        self._spelled: dict[Hashable, int] = {}

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation, guards: Guards | None = None) -> Entries:
        """The bytes that begin a value of any of the groups; the groups differ from each other."""
        groups = [self.members.shapes(value) for value in wanted]
        self.budget.spend(4 + sum(2 + 2 * len(group) for group in groups))
        entries = self._scalars(groups, continuation, guards)
        if guards and guards.is_spelled and (found := self._select(groups, String)):
            texts, masks = found
            entries[ord('"')] = self.spelled(
                self.texts.groups(texts),
                (texts, continuation, guards.dead),
                lambda bits: guards.guard(sum_bits(masks, bits)),
                lambda bits: continuation.after(sum_bits(masks, bits)),
            )
        if guards:
            groups = [group if is_opened else () for group, is_opened in zip(groups, guards.is_opened, strict=True)]
        if not (guards and guards.is_spelled) and (found := self._select(groups, String)):
            entries[ord('"')] = self._string(*found, continuation)
        if arrays := self._select(groups, Array):
            entries[ord("[")] = self._push(array_rule, *arrays, continuation)
        if objects := self._select(groups, Object):
            entries[ord("{")] = self._push(object_rule, *objects, continuation)
        return entries

    @staticmethod
    def _select(
        groups: list[tuple[Shape, ...]], kind: type[Kind]
    ) -> tuple[tuple[tuple[Kind, ...], ...], tuple[int, ...]] | None:
        """The distinct groups of one kind and, for each, the groups that it represents, as bits."""
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

    def _scalars(self, groups: list[tuple[Shape, ...]], continuation: Continuation, guards: Guards | None) -> Entries:
        masks: dict[Number | Literal, int] = {}
        for number, group in enumerate(groups):
            for shape in group:
                if isinstance(shape, (Number, Literal)):
                    masks[shape] = masks.get(shape, 0) | 1 << number
        ordered = sorted(masks.items(), key=lambda one: self.members.number(one[0]))
        found = machines([shape for shape, _ in ordered], self.budget)
        parts = tuple((each, mask, 0) for each, (_, mask) in zip(found, ordered, strict=True))
        return self._read(parts, continuation, guards, is_first=True)

    def _read(
        self,
        parts: tuple[tuple[Machine, int, int], ...],
        continuation: Continuation,
        guards: Guards | None,
        *,
        is_first: bool = False,
    ) -> Entries:
        """The bytes after which some machines are still running: (machine, its groups, its state)."""
        self.budget.spend(sum(1 + len(each.rows[state]) for each, _, state in parts))
        targets: dict[int, list[tuple[Machine, int, int]]] = {}
        for each, mask, state in parts:
            for byte, following in each.rows[state].items():
                targets.setdefault(byte, []).append((each, mask, following))
        now = 0 if is_first else _guard(parts, guards)
        return {
            byte: self._step(self._scalar(tuple(found), continuation, guards), now, _guard(found, guards))
            for byte, found in targets.items()
        }

    def _step(self, target: int, now: int, guard: int) -> int:
        """Continue at a point where fewer groups may be left: refused once all of the guard's keys have been seen."""
        return entry(Action.GOTO, target) if guard in (0, now) else self.assembler.guard(target, guard)

    def spelled(self, dfa: DFA, key: Hashable, guard: Callable[[int], int], after: Callable[[int], int]) -> int:
        """The quote that opens a string spelled out inline. ``guard`` gives the keys after which, once all of them have
        been seen, some ends of the automaton (as bits) are no longer expected; ``after`` gives the state after an end.
        """
        left = [guard(bits) for bits in ends_of(dfa, self.budget)]
        if key not in self._spelled:
            self.budget.check(len(self.assembler.entries) + len(dfa))
            first = self._spelled[key] = len(self.assembler.entries)
            targets = dfa.next[:, dfa.columns].tolist()

            def build(state: int) -> Entries:
                self.budget.spend(64)
                entries = {
                    byte: self.assembler.guard(first + target, left[target])
                    for byte, target in enumerate(targets[state])
                    if target != DEAD and left[target] != left[state]
                }
                if ends := int(dfa.accepts[state]):
                    entries[ord('"')] = self._step(after(ends), left[state], guard(ends))
                return entries

            for state in range(len(dfa)):
                self.assembler.state((key, state), partial(build, state))
            self.assembler.add_rows(first, rows_of(dfa, first, self.budget))
        return self.assembler.guard(self._spelled[key], left[0])

    def _scalar(
        self, parts: tuple[tuple[Machine, int, int], ...], continuation: Continuation, guards: Guards | None
    ) -> int:
        """The state inside a number or a literal."""
        self.budget.spend(len(parts))
        bits = 0
        for each, mask, state in parts:
            bits |= mask if each.ends[state] else 0
        if bits and all(not each.rows[state] for each, _, state in parts):
            return continuation.after(bits)

        def build() -> Entries:
            loop, counted = entry(Action.GOTO, state), entry(Action.BLANK, state)
            found = self._read(parts, continuation, guards)
            entries = {byte: counted if value == loop else value for byte, value in found.items()}
            if bits:
                following = continuation.after(bits)
                ends = self.assembler.entries_of(following)
                if guards and (dead := guards.guard(bits)) != _guard(parts, guards):  # this end may not be expected
                    blank = self.assembler.guard(following, dead)
                    ends = {byte: value for byte, value in ends.items() if value & ACTION_MASK != Action.BLANK}
                    ends |= dict.fromkeys(b" \n", blank)
                entries |= ends
                if following in self.assembler.final:
                    self.assembler.final.add(state)
            return entries

        state = self.assembler.state((continuation, parts, guards), build)
        return state


def _guard(parts: Iterable[tuple[Machine, int, int]], guards: Guards | None) -> int:
    """The keys after which, once all of them have been seen, no group of these machines is expected; 0 without
    guards."""
    groups = 0
    for _, mask, _ in parts:
        groups |= mask
    return guards.guard(groups) if guards else 0
