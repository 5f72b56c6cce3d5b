"""Bounds of a compilation, and the error of a grammar that cannot be compiled. Introduced in phase 12.

A hostile grammar costs its sender only: whatever builds states asks the budget before it builds more, so that
compilation ends within the limits whatever the grammar is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shared.errors import RequestError


class GrammarError(RequestError):
    """A grammar cannot be compiled. The message names the keyword or the construct, and where it stands."""


PAUSE = 0.25
"""Of the time between two checks, the most seconds that count: a longer gap is the garbage collector's, or the machine
stood still, and the grammar is not to blame."""


@dataclass(frozen=True)
class Limits:
    """Of one grammar: states of its automaton and of any automaton on the way to it, bytes of its tables, seconds that
    a processor compiles it, and the nesting of a schema.
    """

    states: int = 60_000
    bytes: int = 16_000_000
    seconds: float = 1.0
    nesting: int = 64


@dataclass
class Budget:
    """What a compilation has left of its limits.

    ``clock`` gives seconds: by default those in which this thread ran, so that a grammar is not refused because others
    are compiled beside it.
    """

    limits: Limits = Limits()
    clock: Callable[[], float] = time.thread_time
    num_states: int = field(default=0, init=False)  # of finished parts
    seconds: float = field(default=0.0, init=False)  # that count so far
    checked: float = field(init=False)  # when the clock was read last

    def __post_init__(self) -> None:
        self.checked = self.clock()

    def check(self, num_states: int) -> None:
        """Raise GrammarError if an automaton under construction, with those that are kept, exceeds a limit."""
        if self.num_states + num_states > self.limits.states:
            raise GrammarError(
                f"The grammar needs more than {self.limits.states} states; shorten bounded repeats, minLength and "
                "maxLength, or the number of alternatives."
            )
        now = self.clock()
        self.seconds, self.checked = self.seconds + min(now - self.checked, PAUSE), now
        if self.seconds > self.limits.seconds:
            raise GrammarError(
                f"The grammar took more than {self.limits.seconds:g} s to compile; shorten bounded repeats, or reduce "
                "the number of alternatives."
            )

    @contextmanager
    def attempt(self) -> Iterator["Budget"]:
        """Half of what is left, for a part of the grammar that may fail: its states then count no more."""
        states, seconds = self.limits.states - self.num_states, self.limits.seconds - self.seconds
        part = Budget(replace(self.limits, states=states // 2, seconds=seconds / 2), self.clock)
        try:
            yield part
            self.num_states += part.num_states
        finally:
            self.seconds, self.checked = self.seconds + part.seconds, part.checked

    def keep(self, num_states: int) -> None:
        """Count the states of a finished part of the grammar. Raises GrammarError as ``check`` does."""
        self.check(num_states)
        self.num_states += num_states
