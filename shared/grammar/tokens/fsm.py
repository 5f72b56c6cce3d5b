"""A grammar over tokens: which tokens may follow, and the state that each leads to. Introduced in phase 12.

The automaton reads bytes. A model samples tokens, which may hold several characters, part of one, or the end of one
value and the beginning of the next. So a token is allowed if the automaton can read all its bytes. A state is a
:class:`Configuration`: the automaton's state and its stack.
"""

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import START, Automaton, Configuration
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError, Limits
from shared.grammar.tokens.masks import TokenMasks
from shared.grammar.tokens.vocabulary import GrammarVocabulary


class TokenFSM:
    """One grammar for one vocabulary; immutable except for its cache of masks, so threads may share it."""

    initial_state: Configuration = START

    def __init__(self, automaton: Automaton, vocabulary: GrammarVocabulary) -> None:
        """Raises GrammarError if no token may come first."""
        self.automaton, self.vocabulary = automaton, vocabulary
        self.masks = TokenMasks(automaton, vocabulary)
        if not self.mask(self.initial_state).any():
            raise GrammarError("No token of this model's vocabulary begins a text of the grammar.")

    def allowed_tokens(self, state: Configuration) -> list[int]:
        """The ids of the tokens that may follow, plus those that end the output if it may end here.

        The definition, one byte at a time; ``mask`` gives the same for the whole vocabulary at once.
        """
        # exercise 12x3: the tokens that may follow
        # hint: walk the trie from its root: children(0) gives (byte, node) of each child of node 0
        # hint: automaton.step(now, byte) is the state after a byte, or None: then no token goes on there
        # hint: ids_of.get(node, []) are the ids of the tokens that end at a node, if automaton.fits(now)
        # hint: automaton.is_end(state) says whether the end ids are allowed
        allowed = list(self.vocabulary.end_ids) if self.automaton.is_end(state) else []
        waiting = [(0, state)]
        while waiting:
            node, now = waiting.pop()
            if self.automaton.fits(now):
                allowed += self.vocabulary.ids_of.get(node, [])
            for byte, child in self.vocabulary.children(node):
                after = self.automaton.step(now, byte)
                if after is not None:
                    waiting.append((child, after))
        return sorted(allowed)
        # end exercise

    def mask(self, state: Configuration) -> NDArray[np.bool_]:
        """bool ``[V]``: the same as ``allowed_tokens``."""
        return self.masks.mask(state)

    def next_state(self, state: Configuration, token_id: int) -> Configuration | None:
        """The state after a token; None if the grammar refuses it. A token that ends the output has no next state."""
        token = self.vocabulary.tokens[token_id]
        return self.automaton.walk(state, token) if token else None

    def is_terminal(self, state: Configuration) -> bool:
        """Whether the output may end here."""
        return self.automaton.is_end(state)


class FSMCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary, limits: Limits) -> None:
        self.vocabulary, self.limits = vocabulary, limits

    def compile(self, grammar: Grammar) -> TokenFSM:
        """The grammar over tokens. Raises GrammarError."""
        automaton = grammar.compiled(self.vocabulary.usable_bytes, self.limits).automaton
        assert automaton is not None
        return TokenFSM(automaton, self.vocabulary)
