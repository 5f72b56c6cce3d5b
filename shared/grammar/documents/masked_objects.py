"""Rules of open objects, in which dead alternatives are bits of the frame rather than states. Introduced in phase 12.

Any key may occur in any alternative of an open object, and its value leaves some of the alternatives alive, so the
number of sets would double with each alternative. Here the last bits of the register mark the dead alternatives. A
value that does not fit an alternative kills the alternative at the next comma; a forbidden key does so at its closing
quote. At that quote, the bits also choose which values are allowed. At the closing brace, an alternative with unmet
requirements dies too, and a group ends unless all its alternatives are dead.

Invariant: after every byte, at least one live alternative can still be completed. So a value is never expected only by
dead alternatives: where single bytes of scalars decide between alternatives, the same bits guard them.
"""

from dataclasses import dataclass

from shared.grammar.automata.assembler import MAX_CLASSES, ClauseRow, Entries, Rule, sum_bits
from shared.grammar.automata.automaton import REFUSED, UNBOUNDED, Action, entry
from shared.grammar.documents.clauses import ALWAYS, REGISTER_BITS, Requirements
from shared.grammar.documents.keys import Alive, Follower, KeyStates
from shared.grammar.documents.objects import UNLIMITED, Groups, ObjectRule, WrongRule
from shared.grammar.documents.rules import Guards, ValueSource, blanks
from shared.grammar.limits import GrammarError
from shared.grammar.schema.shapes import Array, Object, Shape, String, Value

FEWEST_MASKED, MOST_MASKED = 4, 48
"""Minimum number of alternatives of a rule that keeps them in its frame; fewer alternatives have only a few sets."""
MOST_CHOSEN = 3
"""Maximum number of parts of a key's values for which all sets are distinguished; with more, the first live one is
expected."""


def object_rule(values: ValueSource, groups: Groups) -> Rule:
    """The rule of some groups of objects."""
    shapes = [shape for group in groups for shape in group]
    if any(shape.wrong for shape in shapes):
        return WrongRule(values, groups).begun()
    requirements = Requirements(values.members, shapes)
    if FEWEST_MASKED <= len(shapes) <= MOST_MASKED and len(groups) <= MAX_CLASSES and _is_open(requirements):
        try:
            reserved = Requirements(values.members, shapes, len(shapes))
        except GrammarError:  # too few bits
            reserved = None
        if reserved is not None:
            rule = MaskedRule(values, groups, reserved)
            if rule.can_choose():
                return rule.begun()
    return ObjectRule(values, groups, requirements).begun()


def _is_open(requirements: Requirements) -> bool:
    """Whether all alternatives allow any number of unnamed keys, and the same ones."""
    if any(shape.most != UNBOUNDED or shape.names for shape in requirements.shapes):
        return False
    requirements.members.document.budget.spend(2 * len(requirements.shapes) * len(requirements.classes))
    return bool(requirements.classes) and all(
        requirements.other_value(number, bits) is not None
        for number in range(len(requirements.shapes))
        for bits in requirements.classes
    )


Wanted = tuple[tuple[Value, int], ...]
"""Values, and the bits of the alternatives that expect them."""


@dataclass(frozen=True)
class Choice:
    """The values expected after a key.

    Attributes:
        top: a value that accepts all that the others do.
        others: all other values.
        parts: among the others, values opened by a byte that cannot be guarded, with the bits of their alternatives.
        is_spelled: whether the strings of the others are spelled out in the object.
    """

    top: Wanted
    others: Wanted
    parts: tuple[tuple[tuple[Shape, ...], int], ...]
    is_spelled: bool

    def guards(self, shapes: list[tuple[Shape, ...]], opened: list[tuple[Shape, ...]]) -> Guards:
        """The other values with their shapes, if only some parts are expected."""
        is_opened = tuple(_opened(some, self.is_spelled) in opened for some in shapes)
        return Guards(tuple(mask for _, mask in self.others), is_opened, self.is_spelled)


class MaskedRule(ObjectRule):
    """The rule of some groups of open objects."""

    def __init__(self, values: ValueSource, groups: Groups, requirements: Requirements) -> None:
        size = sum(map(len, groups))
        self.dead = [1 << REGISTER_BITS - 1 - number for number in range(size)]
        self.all_dead = sum(self.dead)
        self.alive: Alive = tuple((number, UNLIMITED) for number in range(size))
        super().__init__(values, groups, requirements)

    def can_choose(self) -> bool:
        """Whether the values of each key can be distinguished; the check is exact for a few alternatives."""
        followers = [self.follow_name(self.alive, name) for name in self.requirements.names]
        followers += [self.follow_other(self.alive, bits) for bits in sorted(self.requirements.classes)]
        most = max((len(self._choice(found).parts) for found in followers if found), default=0)
        return most <= (MOST_CHOSEN if len(self.dead) < 6 else MAX_CLASSES - 2)

    def _state(self, part: str, alive: Alive) -> int:
        return super()._state(part, ()) if part == "comma" else super()._state(part, alive)

    def keys(self, alive: Alive) -> KeyStates:
        return super().keys(self.alive)

    # Values

    def _choice(self, followers: tuple[Follower, ...]) -> Choice:
        self.assembler.budget.spend(4 * len(followers))
        same: dict[tuple[Shape, ...], Value] = {}  # values that accept the same texts
        masks: dict[Value, int] = {}
        for number, _, value in sorted(followers, key=lambda each: len(each[2])):
            one = same.setdefault(self.members.shapes(value), value)
            masks[one] = masks.get(one, 0) | self.dead[number]
        common = frozenset.intersection(*masks)
        top = tuple(each for each in masks.items() if each[0] == common)
        others = tuple(sorted((each for each in masks.items() if each[0] != common), key=lambda each: -each[1]))
        shapes = [self.members.shapes(value) for value, _ in others]
        texts = {tuple(shape for shape in some if isinstance(shape, String)) for some in shapes} - {()}
        parts: dict[tuple[Shape, ...], int] = {}
        for some, (_, mask) in zip(shapes, others, strict=True):
            if opened := _opened(some, len(texts) > 1):
                parts[opened] = parts.get(opened, 0) | mask
        return Choice(top, others, tuple(parts.items()), len(texts) > 1)

    def end_key(self, followers: tuple[Follower, ...], bit: int, *, is_bounded: bool) -> int:
        choice = self._choice(followers)
        every = sum(self.dead[number] for number, *_ in followers)
        everything = choice.top + choice.others
        if len(everything) == 1 and every == self.all_dead:
            colon = self._colon(everything, None, every)
            return self.assembler.key(colon, bit, is_bounded=is_bounded) if bit else entry(Action.GOTO, colon)
        kinds = [mask for _, mask in choice.top + choice.parts]
        size = 2 << len(kinds)  # the last bit represents all values
        clauses: list[ClauseRow] = [(size - 1, bit, 0, 1, 0)] if bit and is_bounded else []
        clauses += [(1 << number, mask, 0, 1, 0) for number, mask in enumerate([*kinds, every])]
        if more := bit | self.all_dead & ~every:
            clauses.append((0, *ALWAYS, more))
        shapes = [self.members.shapes(value) for value, _ in choice.others]
        targets = [REFUSED] * (size // 2)
        for colour in range(size // 2):
            self.assembler.budget.spend(1 + len(kinds) + len(shapes))
            opened = [each for number, (each, _) in enumerate(choice.parts) if colour >> len(choice.top) >> number & 1]
            if colour & len(choice.top):
                targets.append(self._colon(everything, None, every))
            elif choice.others:
                few = opened[: 1 if len(choice.parts) > MOST_CHOSEN else None]
                targets.append(self._colon(choice.others, choice.guards(shapes, few), every))
            else:
                targets.append(REFUSED)
        return self.assembler.choose(tuple(clauses), tuple(targets))

    def _colon(self, wanted: Wanted, guards: Guards | None, every: int) -> int:
        """The state after a key. ``every`` holds the bits of all its alternatives."""
        after = AfterMasked(self, tuple(mask for _, mask in wanted), every)
        groups = tuple(value for value, _ in wanted)
        self.assembler.budget.spend(1 + 2 * len(groups))

        key = groups, guards, after
        value: int = self.assembler.state(key, lambda: self.values.entries(groups, after, guards) | blanks(value))
        colon: int = self.assembler.state(
            (*key, "colon"), lambda: {ord(":"): entry(Action.GOTO, value)} | blanks(colon)
        )
        return colon

    # What follows a value

    def after_value(self, dead: int) -> int:
        """The state after a value that some alternatives reject."""
        return self.assembler.state((id(self.rule), "after", dead), lambda: self._after_value(dead))

    def _after_value(self, dead: int) -> Entries:
        entries = blanks(self.after_value(dead)) | self._end(dead)
        comma = self._state("comma", self.alive)
        entries[ord(",")] = entry(Action.GOTO, comma)
        if dead:
            is_alive = (1, self.all_dead, 0, 1, 0)
            entries[ord(",")] = self.assembler.choose(((0, *ALWAYS, dead), is_alive), (REFUSED, comma))
        return entries

    def _close(self, alive: Alive, *, is_new: bool = False) -> Entries:
        return self._end(0)

    def _end(self, dead: int) -> Entries:
        """The closing brace: a group ends if it has a live alternative whose requirements are met."""
        self.assembler.budget.spend(4 * len(self.dead))
        rows: list[ClauseRow] = [(0, *ALWAYS, dead)] if dead else []
        needs: dict[tuple[int, int, int], int] = {}
        groups: dict[int, int] = {}
        for number, (group, _) in enumerate(self.alternatives):
            for clause in self.requirements.clauses[number]:
                needs[clause] = needs.get(clause, 0) | self.dead[number]
            groups[group] = groups.get(group, 0) | self.dead[number]
        rows += [(0, *clause, mask) for clause, mask in needs.items()]
        possible = [group for group, mask in groups.items() if mask & ~dead]
        rows += [(1 << number, groups[group], 0, 1, 0) for number, group in enumerate(possible)]
        if not possible:
            return {}
        colour = self.rule.leave(0, tuple(1 << group for group in possible))
        return {ord("}"): self.assembler.pop(colour, tuple(rows), max(self.closing))}


def _opened(shapes: tuple[Shape, ...], is_spelled: bool) -> tuple[Shape, ...]:
    """The values that are read by a separate rule."""
    return tuple(s for s in shapes if isinstance(s, (Array, Object) if is_spelled else (Array, Object, String)))


@dataclass(frozen=True)
class AfterMasked:
    """After a member: the bits of the alternatives of each group of its value, and those of all alternatives."""

    rule: MaskedRule
    masks: tuple[int, ...]
    every: int

    def after(self, bits: int) -> int:
        self.rule.assembler.budget.spend(1 + len(self.masks))
        alive = sum_bits(self.masks, bits)
        return self.rule.after_value(self.every & ~alive)
