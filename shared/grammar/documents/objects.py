"""Rules of objects: the live alternatives, and what may follow. Introduced in phase 12.

Named keys come in any order: the keys that an object has are bits of a register in its frame, so the states only record
which alternatives their values leave alive. What an alternative still needs is checked when the object closes, by
clauses over the register.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shared.grammar.automata.assembler import Entries, Rule
from shared.grammar.automata.automaton import UNBOUNDED, Action, entry
from shared.grammar.documents.clauses import Clause, Requirements, any_of
from shared.grammar.documents.keys import Alive, Follower, KeyStates, Trie
from shared.grammar.documents.rules import ValueSource, blanks
from shared.grammar.schema.shapes import NEVER, Object, Value

UNLIMITED = -1
Groups = tuple[tuple[Object, ...], ...]


class ObjectRule:
    """Makes the rule of some groups of objects."""

    def __init__(self, values: ValueSource, groups: Groups, requirements: Requirements) -> None:
        self.assembler, self.rule = values.assembler, Rule(values.assembler)
        self.values, self.members, self.requirements = values, values.members, requirements
        self.alternatives = [(number, shape) for number, group in enumerate(groups) for shape in group]
        shapes, self.allowed = self.requirements.shapes, self.requirements.allowed
        self.needed = [self.members.needed(shape) for shape in shapes]
        self.trie = Trie(self.requirements.names, self.assembler.budget)
        self.closing = [self.members.ending_depth(shape) for shape in shapes]
        self.begins = groups
        self._keys: dict[Alive, KeyStates] = {}

    def begun(self) -> Rule:
        """The rule, with its first state."""
        first = [n for n, (group, shape) in enumerate(self.alternatives) if shape in self.begins[group]]
        limits = tuple((number, self._limit(number)) for number in first)
        self.rule.first = self._state("open", limits)
        return self.rule

    def _limit(self, number: int) -> int:
        """How many keys an alternative may have besides those that it needs."""
        shape = self.alternatives[number][1]
        most = shape.most - len(self.needed[number])
        if shape.most == UNBOUNDED or (not self.requirements.others[number] and most >= len(self.allowed[number])):
            return UNLIMITED
        if any(key in self.allowed[number] and key not in self.needed[number] for key, _ in shape.dependents):
            raise self.members.document.error("#", "maxProperties cannot be combined with dependentRequired")
        for node in sorted(shape.outside):
            matches = ((key, self.members.matches(shape, key)) for key in self.needed[number])
            if not any(self.members.is_outside(node, key, matched) for key, matched in matches):
                path = f"{self.members.document.paths[node]}/additionalProperties"
                raise self.members.document.error(path, "its opposite cannot be combined with maxProperties")
        if self.requirements.num_sums > 1 and self.requirements.others[number] and most >= self.requirements.num_sums:
            raise self.members.document.error("#", f"maxProperties above {most} cannot be combined with minProperties")
        return most

    def _state(self, part: str, alive: Alive) -> int:
        build: Callable[[Alive], Entries] = {"open": self._open, "comma": self._comma, "after": self._after}[part]
        self.assembler.budget.spend(1 + len(alive))
        return self.assembler.state((id(self.rule), part, alive), lambda: build(alive))

    def _open(self, alive: Alive) -> Entries:
        """After the opening brace."""
        keys = self.keys(alive)
        quote = {ord('"'): entry(Action.GOTO, keys.first())} if keys.is_possible else {}
        return blanks(self._state("open", alive)) | quote | self._close(alive, is_new=True)

    def _comma(self, alive: Alive) -> Entries:
        """After a comma."""
        quote = {ord('"'): entry(Action.GOTO, self.keys(alive).first())}
        return blanks(self._state("comma", alive)) | quote

    def _after(self, alive: Alive) -> Entries:
        """After a value."""
        entries = blanks(self._state("after", alive))
        # exercise 12x4: the comma
        # hint: self._close(alive) gives the brace that closes, if some alternative may end
        # hint: no comma without a key that may follow: keys.is_possible
        # hint: where all keys that may follow are in keys.mask, the comma is refused once they were all seen: a guard
        entries |= self._close(alive)
        keys = self.keys(alive)
        if keys.is_possible:
            comma = self._state("comma", alive)
            is_open = keys.is_repeatable
            entries[ord(",")] = entry(Action.GOTO, comma) if is_open else self.assembler.guard(comma, keys.mask)
        # end exercise
        return entries

    def _close(self, alive: Alive, *, is_new: bool = False) -> Entries:
        """The closing brace: a group ends if it has an alternative whose requirements are met."""
        self.assembler.budget.spend(2 * len(alive))
        found: dict[int, list[tuple[Clause, ...]]] = {}
        depths: dict[int, list[int]] = {}
        for number, _ in alive:
            group, shape = self.alternatives[number]
            if shape.wrong:
                continue
            clauses = self.requirements.clauses[number]
            if is_new:  # no key was seen
                if any(not trigger for trigger, _, _ in clauses):
                    continue
                clauses = ()
            found.setdefault(group, []).append(clauses)
            depths.setdefault(group, []).append(self.closing[number] if clauses else 0)
        always = 0
        classes: dict[tuple[Clause, ...], int] = {}
        for group, choices in found.items():
            clauses = any_of(choices, self.assembler.budget)
            if clauses:
                classes[clauses] = classes.get(clauses, 0) | 1 << group
            else:
                always |= 1 << group
        if not (always or classes):
            return {}
        colour = self.rule.leave(always, tuple(classes.values()))
        rows = tuple((1 << number, *clause, 0) for number, clauses in enumerate(classes) for clause in clauses)
        depth = 0 if always else min(min(each) for each in depths.values())
        return {ord("}"): self.assembler.pop(colour, rows, depth)}

    # Keys

    def keys(self, alive: Alive) -> KeyStates:
        if alive not in self._keys:
            self._keys[alive] = KeyStates(self, alive)
        return self._keys[alive]

    def follow_name(self, alive: Alive, key: str) -> tuple[Follower, ...]:
        self.assembler.budget.spend(1 + len(alive))
        found = []
        for number, left in alive:
            value = self.allowed[number].get(key)
            is_needed = key in self.needed[number]
            if value is not None and (is_needed or left):
                found.append((number, left if is_needed or left == UNLIMITED else left - 1, value))
        return tuple(found)

    def follow_other(self, alive: Alive, bits: int) -> tuple[Follower, ...]:
        self.assembler.budget.spend(1 + 2 * len(alive))
        found = []
        for number, left in alive:
            value = self.requirements.other_value(number, bits)
            if value is not None and left:
                found.append((number, left if left == UNLIMITED else left - 1, value))
        return tuple(found)

    def end_key(self, followers: tuple[Follower, ...], bit: int, *, is_bounded: bool) -> int:
        colon = self.colon(followers)
        return self.assembler.key(colon, bit, is_bounded=is_bounded) if bit else entry(Action.GOTO, colon)

    def colon(self, followers: tuple[Follower, ...]) -> int:
        """The state after a key."""
        self.assembler.budget.spend(1 + len(followers))
        state: int = self.assembler.state(
            (id(self.rule), "colon", followers),
            lambda: {ord(":"): entry(Action.GOTO, self._value(followers))} | blanks(state),
        )
        return state

    def _value(self, followers: tuple[Follower, ...]) -> int:
        """The state after a colon."""
        self.assembler.budget.spend(1 + len(followers))
        groups: dict[Value, int] = {}
        grouped = tuple((number, left, groups.setdefault(value, len(groups))) for number, left, value in followers)
        wanted, after = tuple(groups), AfterMember(self, grouped)
        state: int = self.assembler.state((wanted, after), lambda: self.values.entries(wanted, after) | blanks(state))
        return state

    def after(self, alive: Alive) -> int:
        return self._state("after", alive)


class WrongRule(ObjectRule):
    """The rule of some groups of objects, some of which must have a key with a wrong value: the negations of
    ``additionalProperties`` and ``patternProperties``.

    Such an alternative cannot end. A key that may be the wrong one keeps it alive. If the key's value is wrong, the
    same alternative without this requirement becomes alive as well.
    """

    def __init__(self, values: ValueSource, groups: Groups) -> None:
        met = [[[_met(s, is_named) for is_named in (True, False)] for s in group if s.wrong] for group in groups]
        every = tuple(
            tuple(dict.fromkeys([*group, *(shape for pair in pairs for shape in pair)]))
            for group, pairs in zip(groups, met, strict=True)
        )
        shapes = [shape for group in every for shape in group]
        super().__init__(values, every, Requirements(values.members, shapes))
        self.begins = groups
        self.numbers = {each: number for number, each in enumerate(self.alternatives)}

    def _number(self, number: int, *, is_named: bool) -> int:
        """The alternative that results from a wrong value."""
        group, shape = self.alternatives[number]
        return self.numbers[group, _met(shape, is_named)]

    def follow_name(self, alive: Alive, key: str) -> tuple[Follower, ...]:
        found = super().follow_name(alive, key)
        met = []
        for number, left, value in found:
            shape = self.alternatives[number][1]
            for one in shape.wrong:
                wrong = value | {one.literal}
                if (
                    self.members.is_wrong(one, key, self.members.matches(shape, key))
                    and self.members.depth(wrong) < NEVER
                ):
                    met.append((self._number(number, is_named=True), left, wrong))
        return found + tuple(met)

    def follow_other(self, alive: Alive, bits: int) -> tuple[Follower, ...]:
        found = super().follow_other(alive, bits)
        met = []
        for number, left, _ in found:
            for one in self.alternatives[number][1].wrong:
                target = self._number(number, is_named=False)
                wrong = self.requirements.other_value(target, bits)
                if wrong is not None and self.members.is_wrong(one, None, self.requirements.matched(bits)):
                    met.append((target, left, wrong))
        return found + tuple(met)


def _met(shape: Object, is_named: bool) -> Object:
    """An object after a key with a wrong value."""
    return replace(shape, wrong=frozenset(), last=frozenset() if is_named else shape.wrong)


@dataclass(frozen=True)
class AfterMember:
    """After a member: (alternative, what remains for it, the group of its value)."""

    rule: ObjectRule
    followers: tuple[tuple[int, int, int], ...]

    def after(self, bits: int) -> int:
        self.rule.assembler.budget.spend(1 + len(self.followers))
        return self.rule.after(tuple(sorted({(n, left) for n, left, group in self.followers if bits >> group & 1})))
