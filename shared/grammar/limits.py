"""Bounds of a compilation, and the error of a grammar that cannot be compiled. Introduced in phase 12.

A hostile grammar costs its sender only: every loop whose length the grammar decides counts its work before it works, so
that compilation ends within the limits whatever the grammar is. A count decides and no clock, so a grammar has the same
verdict on every machine, whatever else runs there. The unit of work is about a microsecond of a processor, or 256 bytes
of memory: a transition, a member of an object that is looked at, or 64 cells of a table.

Invariant: the work of a grammar depends on its description alone: neither on the order of sets, nor on what was
compiled before.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

from shared.errors import RequestError


class GrammarError(RequestError):
    """A grammar cannot be compiled. The message names the keyword or the construct, and where it stands."""


class WorkError(GrammarError):
    """A grammar needs more work than its limits allow."""


CELLS = 64
"""Cells of a table that numpy handles for a unit of work."""
ROW = 8
"""Units of work for a row of 256 entries that is made and kept."""
LOOK = 10_000
"""Units of work between two readings of the clock."""


@dataclass(frozen=True)
class Limits:
    """Of one grammar: states of its automaton and of any automaton on the way to it, bytes of its tables, units of work
    that compile it, nesting of a schema, and whether a schema that need not be followed is dropped for want of work.

    ``seconds`` of the wall clock are the last net, for a machine that stands still: far more than the work takes.
    """

    states: int = 60_000
    bytes: int = 16_000_000
    work: int = 1_000_000
    nesting: int = 64
    drops: bool = True
    seconds: float = 60.0


@dataclass
class Budget:
    """What a compilation has used of its limits."""

    limits: Limits = Limits()
    clock: Callable[[], float] = time.monotonic
    num_states: int = field(default=0, init=False)  # of finished parts
    work: int = field(default=0, init=False)
    most_states: int = field(default=0, init=False)  # at once, under construction
    start: float | None = None
    next_look: int = field(default=LOOK, init=False)
    made: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)  # what is remembered, and paid

    def __post_init__(self) -> None:
        self.start = self.clock() if self.start is None else self.start

    def spend(self, units: int) -> None:
        """Count work that is about to be done. Raises WorkError if there is more than the limit."""
        self.work = min(self.work + units, self.limits.work + 1)
        if self.work > self.limits.work:
            raise WorkError(
                f"The grammar needs more than {self.limits.work:,} units of work to compile; shorten bounded repeats, "
                "or reduce the number of alternatives, keys or listed values."
            )
        if self.work >= self.next_look:
            self.next_look = self.work + LOOK
            if self.clock() - (self.start or 0.0) > self.limits.seconds:
                raise GrammarError(
                    f"The grammar was not compiled within {self.limits.seconds:g} s of the clock, though its work is "
                    "within the limit; this machine is too busy, so send it again later."
                )

    def check(self, num_states: int) -> None:
        """Raise GrammarError if an automaton under construction, with those that are kept, has too many states."""
        self.check_states(num_states)
        self.spend(1)

    def check_states(self, num_states: int) -> None:
        """As ``check``, where the work is counted by itself."""
        self.most_states = max(self.most_states, num_states)
        if self.num_states + num_states > self.limits.states:
            raise GrammarError(
                f"The grammar needs more than {self.limits.states} states; shorten bounded repeats, minLength and "
                "maxLength, or the number of alternatives."
            )

    @contextmanager
    def attempt(self) -> Iterator["Budget"]:
        """Half of what is left, for a part of the grammar that may fail: its states then count no more."""
        states, work = self.limits.states - self.num_states, self.limits.work - self.work
        part = Budget(replace(self.limits, states=states // 2, work=work // 2), self.clock, self.start)
        try:
            yield part
            self.num_states += part.num_states
        finally:
            self.work += part.work

    def keep(self, num_states: int) -> None:
        """Count the states of a finished part of the grammar. Raises GrammarError as ``check`` does."""
        self.check(num_states)
        self.num_states += num_states


Made = TypeVar("Made")


class Remembered(Generic[Made]):
    """The last results of a costly step. What is remembered costs a budget once what it cost to make, so that a
    verdict does not depend on what was compiled before.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, tuple[Made, int, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Made], budget: Budget) -> Made:
        """What ``make`` makes with the budget. Raises GrammarError as it does."""
        paid = id(self), key
        if paid in budget.made:
            return cast(Made, budget.made[paid])
        found = self._kept.get(key)
        if found is not None:
            made, work, states = found
            budget.check_states(states)
            budget.spend(work)
        else:
            before, states, budget.most_states = budget.work, budget.most_states, 0
            made = make()
            self._kept[key] = made, budget.work - before, budget.most_states
            budget.most_states = max(states, budget.most_states)
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)
        budget.made[paid] = made
        return made
