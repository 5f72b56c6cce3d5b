"""The grammar state of an output at each of its tokens, for observers such as traces and the server's page.

An engine keeps only the states that it needs. An observer walks the grammar separately, token by token, so that an
unobserved output costs nothing. Introduced in phase 12.

Invariant: a position is the one at which its token was sampled, before the token was read.
"""

from typing import NamedTuple

import numpy as np

from shared.grammar.automata.automaton import Configuration
from shared.grammar.tokens.fsm import TokenFSM


class Position(NamedTuple):
    """A position in a grammar: the automaton's state, what is open, and how many tokens may follow.

    ``stack`` holds the byte that opened each frame, outermost first: ``{["`` is a string in an array in an object.
    """

    state: int
    stack: str
    num_allowed: int


class Progress:
    """Follows one output. Used by one thread at a time."""

    def __init__(self, fsm: TokenFSM) -> None:
        self.fsm = fsm
        self.now: Configuration | None = fsm.initial_state
        self.stack = ""

    @property
    def position(self) -> Position | None:
        """The position of the output; None after the end of the grammar."""
        if self.now is None:
            return None
        return Position(self.now.state, self.stack, int(np.count_nonzero(self.fsm.mask(self.now))))

    def read(self, token_id: int) -> Position | None:
        """Advance by a token, and return the position before it; None after the end of the grammar."""
        position = self.position
        if position is None:
            return None
        token = self.fsm.vocabulary.tokens[token_id]
        for byte in token:
            if self.now is None:
                break
            self.now = self.fsm.automaton.step(self.now, byte)
            depth = len(self.now.stack) if self.now is not None else 0
            self.stack = self.stack + chr(byte) if depth > len(self.stack) else self.stack[:depth]
        if not token:
            self.now = None
        return position
