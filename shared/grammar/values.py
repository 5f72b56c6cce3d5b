"""What may stand where a value is wanted: the bytes with which it begins. Introduced in phase 12.

A value is wanted for one or more groups at a time, one for each alternative that is alive and
sees it differently. Objects, arrays and strings push the rule of their groups; numbers and literals are spelled out in
place, since only what follows them shows where they end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from shared.grammar.arrays import ArrayRule
from shared.grammar.assembler import Assembler, Continuation, Entries, Rule
from shared.grammar.automaton import UNBOUNDED, Action, entry
from shared.grammar.digits import machine
from shared.grammar.limits import Budget
from shared.grammar.machines import Machine, spell_all
from shared.grammar.masked_objects import object_rule
from shared.grammar.members import Members
from shared.grammar.plain import ACTION_MASK
from shared.grammar.schema_document import SchemaDocument
from shared.grammar.shapes import Array, Literal, Number, Object, Shape, String, Value
from shared.grammar.strings import Groups, StringRule
from shared.grammar.texts import Texts, spell

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
        self._listed: dict[String, Machine] = {}

    def entries(self, wanted: tuple[Value, ...], continuation: Continuation, guards: tuple[int, ...] = ()) -> Entries:
        """The bytes with which a value of any of the groups begins; the groups differ from each other.

        Args:
            guards: of each group keys of the object around it, all of which are seen when the group is not wanted; it
                is one of scalars and listed strings, which are spelled out here. 0: the group is wanted.
        """
        groups = [self.members.shapes(value) for value in wanted]
        self.budget.spend(4 + sum(2 + 2 * len(group) for group in groups))
        entries = self._scalars(groups, continuation, guards)
        if guards:
            groups = [() if guard else group for group, guard in zip(groups, guards, strict=True)]
        if found := self._select(groups, String):
            entries[ord('"')] = self._string(*found, continuation)
        if arrays := self._select(groups, Array):
            entries[ord("[")] = self._push(ArrayRule, *arrays, continuation)
        if objects := self._select(groups, Object):
            entries[ord("{")] = self._push(object_rule, *objects, continuation)
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
        if not is_single or others or not self.texts.is_counted(shape):
            return self._push(StringRule, groups, masks, continuation)
        free = replace(shape, fewest=0, most=UNBOUNDED)
        key = StringRule, free
        if key not in self._rules:
            self._rules[key] = StringRule(self, ((free,),), is_counted=True)
        return self.assembler.push(self._rules[key], Mapped(continuation, masks), shape.fewest, shape.most)

    # Numbers and literals

    def is_listed(self, value: Value) -> bool:
        """Whether a value is spelled out where it stands: it is one of scalars and listed strings."""
        shapes = self.members.shapes(value)
        return all(isinstance(s, (Number, Literal)) or (isinstance(s, String) and s.values is not None) for s in shapes)

    def _machine(self, shape: Number | Literal | String) -> Machine:
        if not isinstance(shape, String):
            return machine(shape, self.budget)
        if shape not in self._listed:
            dfa = self.texts.dfa(shape)
            texts = [text for value in sorted(shape.values or ()) if (text := spell(value)) is not None]
            found = [f'"{text.decode()}"' for text in texts if dfa.run(text)]
            self._listed[shape] = spell_all(found, self.budget)
        return self._listed[shape]

    def _scalars(self, groups: list[tuple[Shape, ...]], continuation: Continuation, guards: tuple[int, ...]) -> Entries:
        masks: dict[Number | Literal | String, int] = {}
        for number, group in enumerate(groups):
            for shape in group:
                is_guarded = bool(guards) and guards[number] > 0
                if isinstance(shape, (Number, Literal)) or (is_guarded and isinstance(shape, String)):
                    masks[shape] = masks.get(shape, 0) | 1 << number
        ordered = sorted(masks.items(), key=lambda one: self.members.number(one[0]))
        parts = tuple((self._machine(shape), mask, 0) for shape, mask in ordered)
        return self._read(parts, continuation, guards, is_first=True)

    def _read(
        self,
        parts: tuple[tuple[Machine, int, int], ...],
        continuation: Continuation,
        guards: tuple[int, ...],
        *,
        is_first: bool = False,
    ) -> Entries:
        """The bytes behind which some of the machines still run: (machine, its groups, its state)."""
        self.budget.spend(sum(1 + len(each.rows[state]) for each, _, state in parts))
        targets: dict[int, list[tuple[Machine, int, int]]] = {}
        for each, mask, state in parts:
            for byte, following in each.rows[state].items():
                targets.setdefault(byte, []).append((each, mask, following))
        now, entries = 0 if is_first else _guard(parts, guards), {}
        for byte, found in targets.items():
            target, guard = self._scalar(tuple(found), continuation, guards), _guard(found, guards)
            entries[byte] = self.assembler.guard(target, guard) if guard not in (0, now) else entry(Action.GOTO, target)
        return entries

    def _scalar(
        self, parts: tuple[tuple[Machine, int, int], ...], continuation: Continuation, guards: tuple[int, ...]
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
                if guards and bits != _groups(parts):  # what follows must ask whether one of these is wanted
                    ends = {byte: value for byte, value in ends.items() if value & ACTION_MASK != Action.BLANK}
                entries |= ends
                if following in self.assembler.final:
                    self.assembler.final.add(state)
            return entries

        state = self.assembler.state((continuation, parts, guards), build)
        return state


def _groups(parts: Iterable[tuple[Machine, int, int]]) -> int:
    """The groups of some machines, as bits."""
    found = 0
    for _, mask, _ in parts:
        found |= mask
    return found


def _guard(parts: Iterable[tuple[Machine, int, int]], guards: tuple[int, ...]) -> int:
    """The keys all of which are seen when no group of these machines is wanted; 0 if one is."""
    masks, groups = 0, _groups(parts)
    for number, guard in enumerate(guards):
        if groups >> number & 1:
            if not guard:
                return 0
            masks |= guard
    return masks
