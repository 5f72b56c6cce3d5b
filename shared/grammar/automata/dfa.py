"""Deterministic automata over bytes. Introduced in phase 12.

A ``DFA`` accepts with a set of bits, so one automaton can distinguish several languages. Two automata that run side by
side give their union, intersection or difference, depending on which bits are kept
(:mod:`shared.grammar.automata.languages`).

Invariants: state 0 is the first; every state can be reached, and can reach an end (an empty language has one state that
does not accept); bytes that no state distinguishes share a column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEAD = -1


@dataclass(frozen=True, eq=False)
class DFA:
    """S states, C columns.

    Attributes:
        columns: uint8 ``[256]``, the column of each byte.
        next: int32 ``[S, C]``, the next state, or ``DEAD``.
        accepts: int64 ``[S]``, the languages (as bits) that contain a text ending here.
    """

    columns: NDArray[np.uint8]
    next: NDArray[np.int32]
    accepts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.next)

    @property
    def num_cells(self) -> int:
        return self.next.size

    @property
    def is_empty(self) -> bool:
        """Whether it accepts no text."""
        return not self.accepts.any()

    def run(self, text: bytes) -> int:
        """The bits with which the text is accepted; 0 if it is not."""
        state = 0
        for byte in text:
            state = int(self.next[state, self.columns[byte]])
            if state == DEAD:
                return 0
        return int(self.accepts[state])


def shared_columns(columns: Sequence[NDArray[Any]]) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
    """The columns of bytes for several automata side by side, ``[256]`` each, and the first byte of each column."""
    _, firsts, inverse = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
    return inverse.reshape(-1).astype(np.uint8), firsts


def trim(dfa: DFA) -> DFA:
    """Removes states that cannot be reached or cannot reach an end; the rest are in breadth-first order from the
    first."""
    size = len(dfa)
    sources, _ = np.nonzero(dfa.next != DEAD)
    targets = dfa.next[dfa.next != DEAD]
    order = np.argsort(targets, kind="stable")
    sources, starts = sources[order], np.searchsorted(targets[order], np.arange(size + 1))
    is_alive = dfa.accepts != 0
    waiting = np.flatnonzero(is_alive).tolist()
    while waiting:
        state = waiting.pop()
        for source in sources[starts[state] : starts[state + 1]].tolist():
            if not is_alive[source]:
                is_alive[source] = True
                waiting.append(source)
    numbers = np.full(size + 1, DEAD, np.int32)  # the last entry is DEAD's
    numbers[0], reached = 0, [0]
    rows = dfa.next.tolist()
    for state in reached:  # which grows
        for target in rows[state]:
            if target != DEAD and is_alive[target] and numbers[target] == DEAD:
                numbers[target] = len(reached)
                reached.append(target)
    return DFA(dfa.columns, numbers[dfa.next[reached]], dfa.accepts[reached])


def restrict(dfa: DFA, is_usable: NDArray[np.bool_]) -> DFA:
    """The texts that consist of usable bytes only, bool ``[256]``."""
    if is_usable.all():
        return dfa
    numbers = np.where(is_usable, dfa.columns, dfa.next.shape[1])  # all other bytes share a column
    dead = np.full((len(dfa), 1), DEAD, np.int32)
    used, columns = np.unique(numbers, return_inverse=True)
    return trim(DFA(columns.astype(np.uint8), np.append(dfa.next, dead, axis=1)[:, used], dfa.accepts))


def merge_columns(dfa: DFA) -> DFA:
    """Bytes that no state distinguishes share a column, in the order of the bytes."""
    _, firsts, inverse = np.unique(dfa.next, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    numbers = np.empty(len(firsts), np.uint8)
    numbers[order] = np.arange(len(firsts))
    return DFA(numbers[inverse.reshape(-1)[dfa.columns]], np.ascontiguousarray(dfa.next[:, firsts[order]]), dfa.accepts)
