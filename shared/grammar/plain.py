"""Plain text: the characters that every string of JSON and every dot of a regex may hold. Introduced in phase 12.

Most tokens are plain. In a *free* state, as inside a string, every plain character leads back to the state, so there
the plain tokens are allowed without a walk.

Invariant: what is said to be plain or free is; not all that could be is found.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automaton import ACTION_BITS, REFUSED, Action, Automaton, Integers

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


def _pattern() -> re.Pattern[bytes]:
    sequences = (b"".join(b"[\\x%02x-\\x%02x]" % pair for pair in sequence) for sequence in PLAIN_SEQUENCES)
    return re.compile(b"(?:" + b"|".join(sequences) + b")*+\\Z")


_PLAIN_END = _pattern()  # finds where the plain end of a token begins


def plain_from(tokens: Sequence[bytes], usable_bytes: NDArray[np.bool_]) -> Integers:
    """From which byte on each token is plain: int32 ``[V]``, the length of the token if its end is not.

    Args:
        usable_bytes: bool ``[256]``. A token with another byte counts as plain nowhere.
    """
    unusable = bytes(np.flatnonzero(~usable_bytes).tolist())
    return np.array(
        [
            len(token) if token.translate(None, unusable) != token else _PLAIN_END.search(token).start()  # type: ignore[union-attr]
            for token in tokens
        ],
        np.int32,
    )


def free_loops(automaton: Automaton, usable_bytes: NDArray[np.bool_]) -> Integers:
    """The entry by which letters lead from a state back to it, ``REFUSED`` if any plain character does not: ``[S]``.

    With a COUNT every character counts once, at any of its bytes; with a GOTO none does.

    Args:
        usable_bytes: bool ``[256]``; characters with another byte are not asked.
    """
    table = automaton.table
    found = np.full(automaton.num_states, REFUSED, np.int32)
    columns = _columns(automaton, 0x23, 0x5B, usable_bytes)
    if not len(columns):
        return found
    loops = table[:, columns[0]]
    can_loop = (loops >> ACTION_BITS == np.arange(automaton.num_states)) & (loops != REFUSED)
    for state in np.flatnonzero(can_loop & np.isin(loops & ACTION_MASK, (Action.GOTO, Action.COUNT))).tolist():
        loop = int(loops[state])
        if all(_leads_back(automaton, state, loop, sequence, usable_bytes) for sequence in PLAIN_SEQUENCES):
            found[state] = loop
    return found


def _columns(automaton: Automaton, first: int, last: int, usable_bytes: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.unique(automaton.columns[first : last + 1][usable_bytes[first : last + 1]])


def _leads_back(
    automaton: Automaton, state: int, loop: int, sequence: tuple[tuple[int, int], ...], usable: NDArray[np.bool_]
) -> bool:
    """Whether all characters of one sequence of ranges lead from a state back to it, and count as ``loop`` does."""
    states, num_counted = np.array([state]), 0
    for first, last in sequence:
        entries = np.unique(automaton.table[np.ix_(states, _columns(automaton, first, last, usable))])
        actions = np.unique(entries & ACTION_MASK).tolist()
        if (entries == REFUSED).any() or actions not in ([], [Action.GOTO], [Action.COUNT]):
            return False
        states = np.unique(entries >> ACTION_BITS)
        num_counted += Action.COUNT in actions
    return not len(states) or (states.tolist() == [state] and num_counted == (loop & ACTION_MASK == Action.COUNT))
