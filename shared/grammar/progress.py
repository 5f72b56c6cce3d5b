"""Where an output stands in its grammar at each of its tokens, for those who watch: traces and the page of a server.

An engine keeps states as it needs them. A watcher walks once more beside it, token by token, so that nothing is
computed for an output that is not watched. Introduced in phase 12.

Invariant: a position is that in which its token was drawn, before it was read.
"""

from typing import NamedTuple

import numpy as np

from shared.grammar.automata.automaton import Configuration
from shared.grammar.tokens.fsm import TokenFSM


class Position(NamedTuple):
    """A place in a grammar: the automaton's state, what is open, and how many tokens may follow.

    ``stack`` holds the byte that opened each frame, the lowest first: ``{["`` is a string in an array in an object.
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
        """Where the output stands; None after the end of the grammar."""
        if self.now is None:
            return None
        return Position(self.now.state, self.stack, int(np.count_nonzero(self.fsm.mask(self.now))))

    def read(self, token_id: int) -> Position | None:
        """Go on after a token, and return the position before it; None after the end of the grammar."""
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
