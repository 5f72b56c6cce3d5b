"""Plain text: the characters that every JSON string and every dot of a regex may hold. Introduced in phase 12.

Many states loop on certain characters, and there all tokens made of these characters are allowed without a walk. A
*free* state, as inside a string, loops on every plain character, and most tokens are plain.

Invariant: everything that is reported as plain or as a loop is one; some cases may be missed.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import ACTION_BITS, REFUSED, Action, Automaton, Integers, entry

PLAIN_SEQUENCES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0x20, 0x21),),  # no control characters, no quote, no backslash
    ((0x23, 0x5B),),
    ((0x5D, 0x7F),),
    ((0xC2, 0xDF), (0x80, 0xBF)),
    ((0xE0, 0xE0), (0xA0, 0xBF), (0x80, 0xBF)),
    ((0xE1, 0xE1), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xE2, 0xE2), (0x80, 0x80), (0x80, 0xA7)),  # U+2028 and U+2029 end lines, so a dot refuses them
    ((0xE2, 0xE2), (0x80, 0x80), (0xAA, 0xBF)),
    ((0xE2, 0xE2), (0x81, 0xBF), (0x80, 0xBF)),
    ((0xE3, 0xEC), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xED, 0xED), (0x80, 0x9F), (0x80, 0xBF)),  # no surrogates
    ((0xEE, 0xEF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF0, 0xF0), (0x90, 0xBF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF1, 0xF3), (0x80, 0xBF), (0x80, 0xBF), (0x80, 0xBF)),
    ((0xF4, 0xF4), (0x80, 0x8F), (0x80, 0xBF), (0x80, 0xBF)),
)
"""The plain characters in UTF-8, as sequences of ranges of bytes."""
ACTION_MASK = (1 << ACTION_BITS) - 1
NOT_ASCII, ODD = 1 << 0, 1 << 1
"""Bits of a set of characters, in which bit b otherwise represents the ASCII character b. The first represents all
plain characters that are not ASCII; the second the ASCII characters 0 and 1, whose bits these are, and which are in no
loop."""
FIRST_SYMBOL = 2
SMALLEST_LOOP = 16
"""ASCII characters without which a loop is not used: few tokens consist only of others."""


def _pattern() -> re.Pattern[bytes]:
    sequences = (b"".join(b"[\\x%02x-\\x%02x]" % pair for pair in sequence) for sequence in PLAIN_SEQUENCES)
    return re.compile(b"(?:" + b"|".join(sequences) + b")*+\\Z")


_PLAIN_END = _pattern()  # finds where a token's plain end begins


def plain_from(tokens: Sequence[bytes], usable_bytes: NDArray[np.bool_]) -> Integers:
    """The byte from which each token is plain: int32 ``[V]``; the token's length if its end is not plain.
    ``usable_bytes``: bool ``[256]``; a token with any other byte never counts as plain.
    """
    unusable = bytes(np.flatnonzero(~usable_bytes).tolist())
    return np.array(
        [
            len(token) if token.translate(None, unusable) != token else _PLAIN_END.search(token).start()  # type: ignore[union-attr]
            for token in tokens
        ],
        np.int32,
    )


class Loop(NamedTuple):
    """How a state loops: on each character of the set ``symbols``, with one action for all. With COUNT, every character
    counts once, at any one of its bytes; with GOTO, none does.
    """

    action: Action
    symbols: int


class Loops:
    """The loops of an automaton's states, each found on first request. ``usable_bytes``: bool ``[256]``; non-ASCII
    characters with other bytes are not tried.
    """

    def __init__(self, automaton: Automaton, usable_bytes: NDArray[np.bool_]) -> None:
        self.automaton = automaton
        ascii_plain = (byte for (first, last), *rest in PLAIN_SEQUENCES if not rest for byte in range(first, last + 1))
        self.plain = NOT_ASCII | sum(1 << byte for byte in ascii_plain if usable_bytes[byte])
        table, columns = automaton.table, automaton.columns
        column_of, is_usable = columns.tolist(), usable_bytes.tolist()

        def used(first: int, last: int) -> list[int]:
            return sorted({column_of[byte] for byte in range(first, last + 1) if is_usable[byte]})

        self._sequences = [[used(*span) for span in sequence] for sequence in PLAIN_SEQUENCES if len(sequence) > 1]
        sizes = np.bincount(columns[FIRST_SYMBOL:128], minlength=table.shape[1])
        leads_back = table >> ACTION_BITS == np.arange(len(table))[:, None]
        actions = np.where(leads_back, table & ACTION_MASK, -1)
        self._sizes = np.stack([(actions == action) @ sizes for action in (Action.GOTO, Action.COUNT)])
        self.can_loop: NDArray[np.bool_] = self._sizes.max(0) >= SMALLEST_LOOP
        self._found: dict[int, Loop | None] = {}

    def of(self, state: int) -> Loop | None:
        """The loop of a state; None if it has none, or only a small one."""
        if state not in self._found:
            self._found[state] = self._loop(state) if self.can_loop[state] else None
        return self._found[state]

    def is_free(self, state: int) -> bool:
        """Whether all plain characters lead from a state back to itself."""
        loop = self.of(state)
        return loop is not None and not self.plain & ~loop.symbols

    def _loop(self, state: int) -> Loop:
        counted = self._sizes[1, state] > self._sizes[0, state]
        action = Action.COUNT if counted else Action.GOTO
        is_in = self.automaton.table[state] == entry(action, state)
        ascii_bytes = FIRST_SYMBOL + np.flatnonzero(is_in[self.automaton.columns[FIRST_SYMBOL:128]])
        symbols = sum(1 << byte for byte in ascii_bytes.tolist())
        is_whole = all(self._leads_back(state, action, sequence) for sequence in self._sequences)
        return Loop(action, symbols | NOT_ASCII * is_whole)

    def _leads_back(self, state: int, action: Action, sequence: list[list[int]]) -> bool:
        """Whether all characters that a sequence of columns spells lead from a state back to itself with ``action``."""
        states, num_counted = {state}, 0
        for columns in sequence:
            entries = {value for each in states for value in self.automaton.table[each][columns].tolist()}
            actions = {value & ACTION_MASK for value in entries}
            if REFUSED in entries or actions not in (set(), {Action.GOTO}, {Action.COUNT}):
                return False
            states = {value >> ACTION_BITS for value in entries}
            num_counted += Action.COUNT in actions
        return not states or (states == {state} and num_counted == (action is Action.COUNT))


def free_loops(automaton: Automaton, usable_bytes: NDArray[np.bool_]) -> Integers:
    """The entry by which plain characters lead from a state back to itself; ``REFUSED`` if any of them does not:
    ``[S]``."""
    loops, found = Loops(automaton, usable_bytes), np.full(automaton.num_states, REFUSED, np.int32)
    for state in np.flatnonzero(loops.can_loop).tolist():
        loop = loops.of(state)
        if loop is not None and loops.is_free(state):
            found[state] = entry(loop.action, state)
    return found
