"""What token walks carry besides their state, as numbered contexts, and which parts of it a mask depends on. Introduced
in phase 12.

A configuration has counters, keys and a stack. A mask's tokens lead to only a few different contexts. So walks refer to
them by number, and each step that changes more than the state is computed once for all of them.

Invariant: :meth:`Contexts.examined` lists everything in the first configuration's frames that the steps depend on.
"""

from typing import NamedTuple

import numpy as np

from shared.grammar.automata.automaton import (
    ACTION_BITS,
    REFUSED,
    UNBOUNDED,
    Action,
    Automaton,
    Configuration,
    blanks_after,
)
from shared.grammar.automata.plain import ACTION_MASK
from shared.grammar.tokens.byte_table import ByteTable

ZERO, NINE = b"09"
GOTO, COUNT, BLANK = int(Action.GOTO), int(Action.COUNT), int(Action.BLANK)
Context = tuple[int, int, int, int, tuple[tuple[int, int], ...]]
"""A configuration without its state."""


class Fact(NamedTuple):
    """A dependency of a mask: on the frame ``depth`` levels down, or on the keys that its object has seen.

    KEY     which keys of the set ``argument`` were seen
    GUARD   whether the guard ``argument`` is full, once the keys ``added`` were seen too
    POP     the alternatives that the pop ``argument`` leaves, once the keys ``added`` were seen too
    PUSH    the frame itself
    """

    action: int
    depth: int
    argument: int = 0
    added: int = 0

    def answer(self, automaton: Automaton, now: Configuration) -> int:
        """Its value for a configuration; -1 if the configuration has no such frame."""
        depth = len(now.stack) - self.depth
        if self.action == Action.PUSH:
            return now.stack[depth - 1][0] if depth > 0 else -1
        if depth < 0:
            return -1
        seen = (now.stack[depth][1] if self.depth else now.seen) | self.added
        if self.action == Action.KEY:
            return seen & self.argument
        ask = automaton.is_full if self.action == Action.GUARD else automaton.colour
        return ask(self.argument, seen)


class Contexts:
    """The contexts of the walks from one configuration, whose own is number 0.

    Attributes:
        values: the contexts.
        heights: the number of frames on the stack of each.
        unblanked: for each, the number of the same context without blanks.
    """

    def __init__(self, table: ByteTable, now: Configuration) -> None:
        self.table, self.automaton, self.now = table, table.automaton, now
        self.values: list[Context] = []
        self.heights: list[int] = []
        self.unblanked: list[int] = []
        self._numbers: dict[Context, int] = {}
        # for each, the context with one more character; REFUSED if none is allowed
        self._counted: list[int | None] = []
        self._blanked: dict[tuple[int, int], int] = {}  # the context with one more blank or digit
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}
        self._facts: set[Fact] = set()
        self._keys: dict[int, int] = {}  # the relevant keys of the objects this many frames down
        self.number(now[1:])

    def number(self, context: Context) -> int:
        number = self._numbers.get(context)
        if number is None:
            number = self._numbers[context] = len(self.values)
            self.values.append(context)
            self.heights.append(len(context[-1]))
            self._counted.append(None)
            self.unblanked.append(number)
            if context[2]:
                fewest, most, _, seen, stack = context
                self.unblanked[number] = self.number((fewest, most, 0, seen, stack))
        return number

    def step(self, state: int, context: int, byte: int, value: int) -> tuple[int, int]:
        """The state and context after a byte whose entry is ``value``; the context is REFUSED if the byte is
        refused."""
        action = value & ACTION_MASK
        if action == GOTO:
            return value >> ACTION_BITS, self.unblanked[context]
        if action == COUNT:
            return value >> ACTION_BITS, self.count(context)
        if action == BLANK:
            return value >> ACTION_BITS, self.blank(context, byte)
        key = value, self.unblanked[context]
        after = self._steps.get(key)
        if after is None:
            now = Configuration(state, *self.values[context])
            self._examine(now, value)
            moved = self.automaton.step(now, byte)
            after = self._steps[key] = (REFUSED, REFUSED) if moved is None else (moved.state, self.number(moved[1:]))
        return after

    def _examine(self, now: Configuration, value: int) -> None:
        """Record the dependencies of an entry on the configuration from which the walks start, if there are any."""
        height, own = len(now.stack), self.now.stack
        seen = self.now.seen if height >= len(own) else own[height][1]
        if now.stack != own[:height] or seen & ~now.seen:
            return
        action, argument, depth, added = value & ACTION_MASK, value >> ACTION_BITS, len(own) - height, now.seen & ~seen
        if action == Action.KEY:
            self.note(Fact(Action.KEY, depth, int(self.automaton.keys[argument, 1])))
        elif action == Action.GUARD:
            self.note(Fact(Action.GUARD, depth, argument, added))
        elif action == Action.POP:
            self.note(Fact(Action.PUSH, depth))
            _, first, last, _ = self.automaton.pops[argument].tolist()
            if last > first:
                self.note(Fact(Action.POP, depth, argument, added))
        elif action == Action.CHOOSE:  # it may add keys, which other entries then depend on
            _, first, last, _ = self.automaton.pops[argument].tolist()
            asked = self.automaton.clauses[first:last, [1, 2, 4]]
            self.note(Fact(Action.KEY, depth, int(np.bitwise_or.reduce(asked, axis=None))))

    def note(self, fact: Fact) -> None:
        if fact.action == Action.KEY:
            self._keys[fact.depth] = self._keys.get(fact.depth, 0) | fact.argument
        else:
            self._facts.add(fact)

    def examined(self) -> tuple[Fact, ...]:
        """What the mask depends on besides the state, the counters and the free depth of the stack."""
        return (*sorted(self._facts), *(Fact(Action.KEY, *each) for each in sorted(self._keys.items())))

    def count(self, context: int) -> int:
        """The context with one more character; REFUSED if it is not allowed."""
        after = self._counted[context]
        if after is None:
            fewest, most, _, seen, stack = self.values[context]
            after = self.number((max(fewest - 1, 0), less(most, 1), 0, seen, stack)) if most else REFUSED
            self._counted[context] = after
        return after

    def blank(self, context: int, byte: int) -> int:
        """The context with one more blank or digit; REFUSED if the run may not continue."""
        key = context, ZERO if ZERO <= byte <= NINE else byte
        after = self._blanked.get(key)
        if after is None:
            fewest, most, run, seen, stack = self.values[context]
            longer = blanks_after(run, byte)
            after = REFUSED if longer is None else self.number((fewest, most, longer, seen, stack))
            self._blanked[key] = after
        return after


def less(most: int, chars: int) -> int:
    return most if most == UNBOUNDED else most - chars
