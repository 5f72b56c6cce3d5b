"""The automaton of every grammar: reads bytes, and keeps a stack of what is open. Introduced in phase 12.

JSON marks its own nesting: ``{``, ``[`` and the quote that opens a string push; ``}``, ``]`` and the quote that closes
it pop. So each object, array and string rule is a deterministic automaton over bytes, and one stack joins them, which
also handles recursive schemas (a *visibly pushdown* automaton, Alur and Madhusudan, STOC 2004). Numbers, literals and
the keys of an object are spelled out inside the rule. A regex or a choice pushes nothing: its automaton only needs
states.

Besides the stack, a few counters keep the tables small: a string counts its characters, an object's frame holds the set
of keys that it has seen, and the lengths of runs of whitespace and digits are limited.

Invariants: an automaton never changes; every state that can be reached can reach an end (the compilers prune the
others); a configuration never needs a stack of more than ``MAX_DEPTH`` frames to reach its end.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError

MAX_DEPTH = 64
"""Maximum frames of the stack: how deep an output may nest."""
MAX_BLANKS = 20
"""Maximum blanks after a line break between two parts of a document."""
UNBOUNDED = 2**31 - 1
"""The maximum number of characters of a string without ``maxLength``."""
SPACE_ENDED = MAX_BLANKS + 1
"""``Configuration.blanks`` after a single space, after which no further blank is allowed."""
_ASKED = os.environ.get("INFER_MAX_DIGITS", "32")
if not (_ASKED.isascii() and _ASKED.isdecimal() and 1 <= int(_ASKED[:4]) <= 200):
    raise ConfigError(f"INFER_MAX_DIGITS is {_ASKED!r}; it must be a whole number from 1 to 200.")
MAX_DIGITS = int(_ASKED)
"""Maximum run of digits where a number could continue forever: after the first one or two digits of its whole part, and
after the first one of its fraction. At most 200, so that a float can hold such a number, whatever its exponent."""
DIGITS_ENDED = SPACE_ENDED + MAX_DIGITS
"""``Configuration.blanks`` after this many digits: digits count from ``SPACE_ENDED`` on."""
ACTION_BITS = 3
REFUSED = -1


class Action(IntEnum):
    """What a byte does, in the lowest bits of a table entry; the other bits are its argument.

    GOTO    the argument is the next state
    COUNT   begins a character of a string: the argument is the next state; refused where the string may not grow
    PUSH    opens a rule: the argument is a row of ``pushes``
    POP     closes a rule: the argument is a row of ``pops``
    KEY     ends a key of an object: the argument is a row of ``keys``; refused for a key that was seen
    GUARD   the argument is a row of ``guards``; refused where the object may have no further key
    BLANK   a byte of whitespace between two parts of a document, or of digits: the argument is the next state; refused
            where the run is too long
    CHOOSE  goes on by what the object's set holds: the argument is a row of ``pops``; refused where nothing is left
    """

    GOTO = 0
    COUNT = 1
    PUSH = 2
    POP = 3
    KEY = 4
    GUARD = 5
    BLANK = 6
    CHOOSE = 7


def entry(action: Action, argument: int) -> int:
    """An entry of the table."""
    return argument << ACTION_BITS | action


Integers = NDArray[np.int32]
Masks = NDArray[np.uint64]


@dataclass(frozen=True)
class Automaton:
    """A compiled grammar over bytes; S states, C columns. State 0 is the first.

    Attributes:
        columns: uint8 ``[256]``, the column of each byte; bytes that no state distinguishes share one.
        table: int32 ``[S, C]``, an entry (action and argument) or ``REFUSED``.
        is_final: bool ``[S]``: the text may end here, if the stack is empty.
        depths: int32 ``[S]``, the minimum number of further frames needed to end this state's rule.
        pushes: int32 ``[P, 5]``: the first state of the rule; its frame (an index into ``returns``); the minimum and
            maximum number of characters (0 and ``UNBOUNDED`` except for strings); and the frames that the rule, or what
            follows it, needs in addition to those below. The last is the larger of 1 + ``depths`` of its first state
            and ``depths`` of all states to which it returns.
        returns: int32 ``[R]``, the state after a rule, indexed by the sum of frame and colour.
        pops: int32 ``[Q, 4]``: the colour (a set of alternatives, as bits), the range of ``clauses`` to check, and for
            a CHOOSE the frame; a POP takes its frame from the stack, and has 0 here.
        clauses: uint64 ``[L, 5]``: bits of the colour, trigger, keys, least, more. They apply in order: if the object
            has seen all keys of the trigger, and fewer than ``least`` of ``keys``, the bits are removed from the
            colour, and the keys ``more`` count as seen.
        keys: uint64 ``[K, 3]``: next state, keys, whether they are bounded. The lowest unseen key of these becomes
            seen. If all have been seen, a bounded key is refused.
        guards: uint64 ``[G, 4]``: next state, keys, preset, most. The byte is refused if the object has seen at least
            ``most`` of ``keys``; those in ``preset`` count as seen.
    """

    columns: NDArray[np.uint8]
    table: Integers
    is_final: NDArray[np.bool_]
    depths: Integers
    pushes: Integers = field(default_factory=lambda: np.empty((0, 5), np.int32))
    returns: Integers = field(default_factory=lambda: np.empty(0, np.int32))
    pops: Integers = field(default_factory=lambda: np.empty((0, 4), np.int32))
    clauses: Masks = field(default_factory=lambda: np.empty((0, 5), np.uint64))
    keys: Masks = field(default_factory=lambda: np.empty((0, 3), np.uint64))
    guards: Masks = field(default_factory=lambda: np.empty((0, 4), np.uint64))

    @classmethod
    def of_states(cls, columns: NDArray[np.uint8], next_states: Integers, is_final: NDArray[np.bool_]) -> "Automaton":
        """An automaton without a stack; ``next_states`` is int32 ``[S, C]``, ``REFUSED`` where there is none."""
        table = np.where(next_states == REFUSED, REFUSED, next_states << ACTION_BITS | Action.GOTO).astype(np.int32)
        return cls(columns, table, is_final, depths=np.zeros(len(table), np.int32))

    @property
    def num_states(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        return sum(array.nbytes for array in vars(self).values())

    def step(self, now: "Configuration", byte: int) -> "Configuration | None":
        """The configuration after one more byte; None if the grammar refuses it. This defines what the kernels and
        numpy compute for many tokens at once.
        """
        value = int(self.table[now.state, self.columns[byte]])
        if value == REFUSED:
            return None
        argument = value >> ACTION_BITS
        match value & (1 << ACTION_BITS) - 1:
            case Action.GOTO:
                return now._replace(state=argument, blanks=0)
            case Action.BLANK:
                blanks = blanks_after(now.blanks, byte)
                return None if blanks is None else now._replace(state=argument, blanks=blanks)
            case Action.COUNT:
                if now.most == 0:
                    return None
                most = now.most if now.most == UNBOUNDED else now.most - 1
                return now._replace(state=argument, fewest=max(now.fewest - 1, 0), most=most, blanks=0)
            case Action.PUSH:
                return self._push(now, argument)
            case Action.POP:
                return self._pop(now, argument)
            case Action.KEY:
                state, keys, is_bounded = self.keys[argument].tolist()
                missing = keys & ~now.seen
                if not missing and is_bounded:
                    return None
                return now._replace(state=state, seen=now.seen | missing & -missing, blanks=0)
            case Action.GUARD:
                state = int(self.guards[argument, 0])
                return None if self.is_full(argument, now.seen) else now._replace(state=state, blanks=0)
            case _:  # Action.CHOOSE
                colour, seen = self._judge(argument, now.seen)
                state = int(self.returns[self.pops[argument, 3] + colour])
                return None if state == REFUSED else now._replace(state=state, seen=seen, blanks=0)

    def _push(self, now: "Configuration", argument: int) -> "Configuration | None":
        state, frame, fewest, most, depth = self.pushes[argument].tolist()
        if len(now.stack) + depth > MAX_DEPTH:
            return None
        return Configuration(state, fewest, most, 0, 0, (*now.stack, (frame, now.seen)))

    def _pop(self, now: "Configuration", argument: int) -> "Configuration | None":
        if now.fewest > 0:
            return None
        frame, seen = now.stack[-1]
        state = int(self.returns[frame + self.colour(argument, now.seen)])
        return None if state == REFUSED else Configuration(state, 0, UNBOUNDED, 0, seen, now.stack[:-1])

    def _judge(self, argument: int, seen: int) -> tuple[int, int]:
        """The colour of a row of ``pops`` and the keys that are seen, after its clauses."""
        colour, first, last, _ = self.pops[argument].tolist()
        for bits, trigger, keys, least, more in self.clauses[first:last].tolist():
            if seen & trigger == trigger and (seen & keys).bit_count() < least:
                colour, seen = colour & ~bits, seen | more
        return int(colour), int(seen)

    def colour(self, argument: int, seen: int) -> int:
        """The alternatives that a POP leaves to an object with these keys."""
        return self._judge(argument, seen)[0]

    def is_full(self, argument: int, seen: int) -> bool:
        """Whether a GUARD refuses an object with these keys."""
        _, keys, preset, most = self.guards[argument].tolist()
        return bool(((seen | preset) & keys).bit_count() >= most)

    def walk(self, now: "Configuration", text: Iterable[int]) -> "Configuration | None":
        """The configuration after the bytes of one token; None if the grammar refuses one of them, or if reaching its
        end would need too deep a stack.
        """
        configuration: Configuration | None = now
        for byte in text:
            configuration = self.step(configuration, byte)  # type: ignore[arg-type]
            if configuration is None:
                return None
        assert configuration is not None
        return configuration if self.fits(configuration) else None

    def fits(self, now: "Configuration") -> bool:
        """Whether an end can be reached within the maximum depth of the stack."""
        return len(now.stack) + int(self.depths[now.state]) <= MAX_DEPTH

    def is_end(self, now: "Configuration") -> bool:
        """Whether the text may end here."""
        return not now.stack and bool(self.is_final[now.state])

    def accepts(self, text: bytes) -> bool:
        """Whether the grammar accepts the whole text."""
        end = self.walk(START, text)
        return end is not None and self.is_end(end)


class Configuration(NamedTuple):
    """A position in a text: the state, its counters, and the stack.

    ``fewest`` and ``most`` bound the number of characters that a string must and may still have, ``blanks`` is the
    length of the run of whitespace or digits, and ``seen`` the keys that the object has, as bits. A frame of the stack
    holds an index into ``returns`` and the ``seen`` of the object below.
    """

    state: int = 0
    fewest: int = 0
    most: int = UNBOUNDED
    blanks: int = 0
    seen: int = 0
    stack: tuple[tuple[int, int], ...] = ()


START = Configuration()


def blanks_after(run: int, byte: int) -> int | None:
    """The length of a run after one more byte.

    A run is one space, or a line break and up to ``MAX_BLANKS`` blanks, or up to ``MAX_DIGITS`` digits.
    """
    if byte in b"0123456789":
        run = max(run, SPACE_ENDED) + 1
        return run if run <= DIGITS_ENDED else None
    if run == 0 or run > SPACE_ENDED:  # after digits too
        return {ord(" "): SPACE_ENDED, ord("\n"): 1}.get(byte)
    return run + 1 if run <= MAX_BLANKS and byte in b" \t" else None
