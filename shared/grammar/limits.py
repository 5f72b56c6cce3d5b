"""The limits of a compilation, and the error for a grammar that cannot be compiled. Introduced in phase 12.

A hostile grammar harms only its sender: every loop whose length depends on the grammar counts its work in advance, so
compilation ends within the limits for every grammar. A count decides, so a grammar gets the same verdict on every
machine, whatever else runs there; a one-minute timeout is only the last resort. The unit of work is about a microsecond
of a processor, or 256 bytes of memory: a transition, an inspected member of an object, or 64 cells of a table.

Invariant: the work of a grammar depends only on its description, not on the order of sets or on what was compiled
before.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

from shared.errors import RequestError


class GrammarError(RequestError):
    """A grammar cannot be compiled. The message names the keyword or the construct, and its location."""


class WorkError(GrammarError):
    """A grammar needs more work than its limits allow."""


CELLS = 64
"""Table cells that numpy handles per unit of work."""
ROW = 8
"""Units of work for making and keeping a row of 256 entries."""
LOOK = 10_000
"""Units of work between two readings of the clock."""
MOST_KEPT = 5_000_000
"""Maximum units of work of the results that one table caches, about ten bytes each."""


@dataclass(frozen=True)
class Limits:
    """Limits of one grammar: states of its automaton and of any intermediate automaton, bytes of its tables, units of
    work to compile it, nesting of a schema, and whether an optional schema is dropped when the work limit is reached.

    ``seconds`` of wall-clock time are the last resort, for a stalled machine: far more than the work takes.
    """

    states: int = 60_000
    bytes: int = 16_000_000
    work: int = 1_000_000
    nesting: int = 64
    drops: bool = True
    seconds: float = 60.0


@dataclass
class Budget:
    """How much of its limits a compilation has used."""

    limits: Limits = Limits()
    clock: Callable[[], float] = time.monotonic
    num_states: int = field(default=0, init=False)  # of finished parts
    work: int = field(default=0, init=False)
    most_states: int = field(default=0, init=False)  # states under construction at the same time
    start: float | None = None
    next_look: int = field(default=LOOK, init=False)
    # cached results that have been paid for
    made: dict[Hashable, "_Kept"] = field(default_factory=dict, init=False, repr=False)
    # states of the automaton being made
    needed: dict[Hashable, "_Kept"] = field(default_factory=dict, init=False, repr=False)
    paid: int = field(default=0, init=False)  # the share of the work that went into cached results

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
        """Raise GrammarError if an automaton under construction, together with those that are kept, has too many
        states."""
        self.check_states(num_states)
        self.spend(1)

    def check_states(self, num_states: int) -> None:
        """Like ``check``, for code that counts its own work."""
        self.most_states = max(self.most_states, num_states)
        if self.num_states + num_states > self.limits.states:
            raise GrammarError(
                f"The grammar needs more than {self.limits.states} states; shorten bounded repeats, minLength and "
                "maxLength, or the number of alternatives."
            )

    @contextmanager
    def attempt(self, reserve: int = 0) -> Iterator["Budget"]:
        """Half of the remaining budget, for a part of the grammar that may fail; if it does, its states no longer
        count. ``reserve`` units of work are left to others.
        """
        states, work = self.limits.states - self.num_states, max(self.limits.work - self.work - reserve, 0)
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


@dataclass(frozen=True)
class _Kept:
    """A result, its cost without its prerequisites, the number of states at the same time, and the prerequisites with
    their costs."""

    made: object
    work: int
    states: int
    needed: dict[Hashable, "_Kept"]


class Remembered(Generic[Made]):
    """The last results of a costly step: at most ``most`` results, each of which cost at most ``MOST_KEPT`` units.

    A cached result costs a budget, once, what it cost to make, so that a verdict does not depend on earlier
    compilations. A step may need other cached results, from any such table; each is paid for separately.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._work = 0

    def get(self, key: Hashable, make: Callable[[], Made], budget: Budget) -> Made:
        """The result of ``make`` with the budget. Raises GrammarError as it does."""
        paid = id(self), key
        if paid not in budget.made:
            found = self._kept.get(key)
            budget.made[paid] = self._made(key, make, budget) if found is None else _pay(found, budget)
        found = budget.made[paid]
        budget.needed |= {paid: found, **found.needed}
        return cast(Made, found.made)

    def _made(self, key: Hashable, make: Callable[[], Made], budget: Budget) -> _Kept:
        needed, states, others = budget.needed, budget.most_states, budget.paid
        before, budget.needed, budget.most_states = budget.work, {}, 0
        made = make()
        work = budget.work - before - (budget.paid - others)
        found = self._kept[key] = _Kept(made, work, budget.most_states, budget.needed)
        budget.paid += work
        budget.needed, budget.most_states = needed, max(states, budget.most_states)
        self._work += work
        while len(self._kept) > self.most or (self._work > MOST_KEPT and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            self._work -= dropped.work
        return found


def _pay(found: _Kept, budget: Budget) -> _Kept:
    """Spend the cost of a result and its prerequisites, unless already paid."""
    for paid, needed in found.needed.items():
        if paid not in budget.made:
            budget.made[paid] = needed
            budget.check_states(needed.states)
            budget.spend(needed.work)
            budget.paid += needed.work
    budget.check_states(found.states)
    budget.spend(found.work)
    budget.paid += found.work
    return found
