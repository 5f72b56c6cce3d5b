"""The mask of a configuration: which tokens may follow, for the whole vocabulary. Introduced in phase 12.

A mask depends on only a few things: the state, the counters as far as a token can exhaust them, and the frames that a
token can close. These are the key of the cache, which has a byte limit.
"""

from collections import OrderedDict
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.automaton import (
    DIGITS_ENDED,
    MAX_DEPTH,
    SPACE_ENDED,
    UNBOUNDED,
    Automaton,
    Configuration,
)
from shared.grammar.tokens.byte_table import ByteTable
from shared.grammar.tokens.contexts import Fact
from shared.grammar.tokens.taken_tokens import Mask
from shared.grammar.tokens.token_walk import TokenWalk
from shared.grammar.tokens.vocabulary import GrammarVocabulary

CACHE_BYTES = 8_000_000


class TokenMasks:
    """The masks of one grammar. Thread-safe.

    Args:
        cache_bytes: the maximum size of cached masks.
    """

    def __init__(self, automaton: Automaton, vocabulary: GrammarVocabulary, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.automaton, self.vocabulary = automaton, vocabulary
        self.num_walks = 0  # number of masks computed
        self.cache_bytes = cache_bytes
        self.table = ByteTable(automaton, vocabulary)
        self._most = max(1, cache_bytes // (len(vocabulary) // 8 + 200))
        self._masks: OrderedDict[tuple, NDArray[np.uint8]] = OrderedDict()
        self._examined: dict[tuple, set[tuple[Fact, ...]]] = {}  # what the masks of a state have depended on so far
        self._lock = Lock()
        _ = vocabulary.plain, vocabulary.longest_digits  # made now, so that no step has to wait for them

    def mask(self, now: Configuration) -> NDArray[np.bool_]:
        """bool ``[V]``: the tokens that may follow, plus the end ids if the text may end here."""
        found, _ = self.without_end(now)
        if self.automaton.is_end(now):
            found[list(self.vocabulary.end_ids)] = True
        return found

    def without_end(self, now: Configuration) -> Mask:
        """A mask without the end ids."""
        longest = self.vocabulary.longest
        room = min(MAX_DEPTH - len(now.stack), longest + self.table.max_depth + 1)
        most = now.most if now.most == UNBOUNDED else min(now.most, longest)
        if now.blanks > SPACE_ENDED and DIGITS_ENDED - now.blanks >= self.vocabulary.longest_digits:
            now = now._replace(blanks=0)  # no token has more digits than may follow
        place = now.state, min(now.fewest, longest), most, now.blanks, room
        with self._lock:
            for examined in self._examined.get(place, ()):
                key = place, examined, _answers(self.automaton, now, examined)
                if key in self._masks:
                    self._masks.move_to_end(key)
                    packed = self._masks[key]
                    return np.unpackbits(packed, count=len(self.vocabulary)).view(np.bool_), examined
        walk = TokenWalk(self.table, self.vocabulary, now, self.without_end)
        found = walk.run()
        packed, examined = np.packbits(found), walk.contexts.examined()
        with self._lock:
            self.num_walks += 1
            self._examined.setdefault(place, set()).add(examined)
            self._masks[place, examined, _answers(self.automaton, now, examined)] = packed
            while len(self._masks) > self._most:
                self._masks.popitem(last=False)
            if len(self._examined) > 4 * self._most:
                self._examined.clear()
                self._masks.clear()
        return found, examined


def _answers(automaton: Automaton, now: Configuration, examined: tuple[Fact, ...]) -> tuple[int, ...]:
    return tuple(fact.answer(automaton, now) for fact in examined)
