"""Which tokens consist of given characters, and where the other tokens leave them. Introduced in phase 12.

The walk over a trie visits every prefix of a token. This is unnecessary in a state that loops on certain characters, as
inside a string: tokens made of only these characters are allowed, and of the others only the part from the first other
character on matters. Tokens with a common prefix are a range, so parts of a known mask are copied by ranges.

Invariant: nothing here depends on a grammar.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.grammar.automata.plain import FIRST_SYMBOL, NOT_ASCII, ODD, PLAIN_SEQUENCES, plain_from

MAX_SETS = 16
BLANKS = SPACE, TAB, LINE_BREAK = b" \t\n"
HALF = (1 << 64) - 1
Array = NDArray[Any]


def ranges(first: Array, count: Array) -> Array:
    """``count`` consecutive numbers from each ``first`` on."""
    return np.arange(count.sum()) + (first - count.cumsum() + count).repeat(count)


@dataclass(frozen=True, eq=False)
class TokensOfSet:
    """The tokens of a set of characters.

    Attributes:
        is_within: bool ``[V]``: the token has no other characters; it may end inside a plain character if the set has
            all non-ASCII ones.
        exits: nodes whose byte is the first outside the set, sorted by this byte.
        starts: ``[257]``: the exits of byte b are in ``exits`` from ``starts[b]`` on.
        chars: ``[exits]``, the number of characters before each exit.
        inside: nodes that begin a character in which a token of ``is_within`` ends.
        copies: two rows of ids. Tokens with the same number of characters before the same ending are allowed or refused
            together, so ``exits`` has one of them; each token in the second row is allowed if the one in the first is.
    """

    is_within: NDArray[np.bool_]
    exits: Array
    starts: Array
    chars: Array
    inside: Array
    copies: Array


@dataclass(frozen=True, eq=False)
class PlainTokens:
    """For the N nodes of a vocabulary's trie and the T tokens that have a node.

    Attributes:
        order: ``[T]``, ids sorted by their bytes, so that the tokens below a node, including its own, are adjacent.
        first, count, own: ``[N]``: the ``count`` tokens below a node start at ``first``; ``own`` of them end at the
            node.
        node_of, first_child: ``[V]`` and ``[N + 1]``, as in the vocabulary.
        parents, byte, depth: ``[N]``; the depth is the number of bytes.
        chars: ``[N]``, the number of characters that begin in a node's bytes.
        token_chars: ``[V]``, the same for each token.
        symbols: uint64 ``[2, N]``, the set of the whole characters of a node, as in
            :mod:`shared.grammar.automata.plain`.
        is_whole: bool ``[N]``: a node's bytes end with a plain or ASCII character.
        is_odd: bool ``[N]``: the bytes end inside a character, and some token continues it in a way that is never
            plain.
        is_ragged: bool ``[N]``: the same, or a token ends inside this character.
        plain_from: ``[V]``, the byte from which each token is plain.
        last_plain_from: ``[N]``, the largest ``plain_from`` of the tokens below a node.
        is_last_blank: bool ``[N]``: in a run of blanks, no token continues below a node, since the next other character
            is a line break.
        tokens: ``[V]``, the bytes.
    """

    order: Array
    first: Array
    count: Array
    own: Array
    node_of: Array
    first_child: Array
    parents: Array
    byte: NDArray[np.uint8]
    depth: Array
    chars: Array
    token_chars: Array
    symbols: NDArray[np.uint64]
    is_whole: NDArray[np.bool_]
    is_odd: NDArray[np.bool_]
    is_ragged: NDArray[np.bool_]
    plain_from: Array
    last_plain_from: Array
    is_last_blank: NDArray[np.bool_]
    tokens: Sequence[bytes]
    _ends: dict[int, int] = field(default_factory=dict)
    _kinds_of_ends: dict[tuple[bytes, ...], int] = field(default_factory=dict)
    _sets: OrderedDict[int, TokensOfSet] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=Lock)

    @classmethod
    def of(
        cls,
        tokens: Sequence[bytes],
        usable_bytes: NDArray[np.bool_],
        node_of: NDArray[np.int32],
        first_child: NDArray[np.int32],
        byte: NDArray[np.uint8],
    ) -> "PlainTokens":
        """From a vocabulary's tokens and trie; see :class:`shared.grammar.tokens.vocabulary.GrammarVocabulary`."""
        size = len(byte)
        parents = np.append(0, np.arange(size, dtype=np.int32).repeat(np.diff(first_child)))
        bounds = [1]
        while bounds[-1] < size:
            bounds.append(int(first_child[bounds[-1]]))
        levels = [slice(*pair) for pair in itertools.pairwise(bounds)]
        own = np.bincount(node_of, minlength=size).astype(np.int32)
        own[0] = 0
        plain = plain_from(tokens, usable_bytes)
        latest = np.zeros(size, np.int32)
        latest[node_of] = plain  # equal tokens share a node and become plain at the same byte
        depth, chars, state = np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.int8)
        symbols, steps = np.zeros((2, size), np.uint64), _character_steps(usable_bytes)
        for number, level in enumerate(levels, 1):
            last, parent = byte[level], parents[level]
            depth[level] = number
            chars[level] = chars[parent] + ((last & 0xC0) != 0x80)
            state[level] = steps[state[parent], last]
            symbols[:, level] = symbols[:, parent] | _symbols(last, state[level])
        count, is_odd = own.copy(), state == _ODD_STATE
        is_ragged = is_odd | (state != 0) & (own > 0)
        is_last = np.ones(size, np.bool_)
        for level in reversed(levels):
            parent, last = parents[level], byte[level]
            is_blank = ((last == SPACE) | (last == TAB)) & (own[level] == 0) & is_last[level]
            is_last[parent[~(is_blank | (last == LINE_BREAK))]] = False
            np.add.at(count, parent, count[level])
            np.maximum.at(latest, parent, latest[level])
            for marks in (is_odd, is_ragged):
                above = parent[marks[level]]
                marks[above[state[above] != 0]] = True
        first = np.zeros(size, np.int32)
        for level in levels:
            parent, before = parents[level], count[level].cumsum() - count[level]
            first[level] = first[parent] + own[parent] + before - before[first_child[parent] - level.start]
        ids = np.flatnonzero(node_of)
        order = ids[np.argsort(first[node_of[ids]], kind="stable")]
        return cls(
            *(order, first, count, own, node_of, first_child, parents, byte, depth, chars, chars[node_of]),
            *(symbols, state == 0, is_odd, is_ragged, plain, latest, is_last, tokens),
        )

    @cached_property
    def views(self) -> tuple[Any, ...]:
        """Arrays from which single numbers are read: ``first_child``, ``is_whole``, ``last_plain_from``, ``depth``,
        ``is_ragged``, ``first``, ``count``, ``own``, ``chars`` and ``is_last_blank``."""
        marks = self.first_child, self.is_whole, self.last_plain_from, self.depth, self.is_ragged
        numbers = self.first, self.count, self.own, self.chars, self.is_last_blank
        return tuple(map(memoryview, (*marks, *numbers)))  # type: ignore[arg-type]

    def within(self, nodes: Array | slice, symbols: int, *, is_whole: bool = True) -> NDArray[np.bool_]:
        """Whether each node's bytes are characters of a set; the last one may be incomplete."""
        others = ~np.array([symbols & HALF, symbols >> 64], np.uint64)
        low, high = self.symbols
        found: NDArray[np.bool_] = (low[nodes] & others[0] | high[nodes] & others[1]) == 0
        return found & (self.is_whole[nodes] == is_whole)

    def symbols_of(self, node: int) -> int:
        """The set of a single node's whole characters."""
        return int(self.symbols[0, node]) | int(self.symbols[1, node]) << 64

    def of_set(self, symbols: int) -> TokensOfSet:
        """The tokens of a set of characters; the most recently requested sets are cached."""
        with self._lock:
            if symbols in self._sets:
                self._sets.move_to_end(symbols)
                return self._sets[symbols]
        is_within = self.within(slice(None), symbols)
        leaves = is_within[self.parents] & ~is_within
        is_inside = np.zeros_like(is_within)
        if symbols & NOT_ASCII:
            is_inside = leaves & (self.byte >= 0x80)
            leaves &= (self.byte < 0x80) | self.is_odd
            is_within |= self.within(slice(None), symbols, is_whole=False) & ~self.is_odd
        nodes = np.flatnonzero(leaves).astype(np.int32)
        chars = self.chars[self.parents[nodes]]
        exits, copies = self._unlike(nodes, chars)
        exits = exits[np.argsort(self.byte[exits], kind="stable")]
        starts = np.append(0, np.bincount(self.byte[exits], minlength=256).cumsum())
        found = TokensOfSet(
            is_within[self.node_of] & (self.node_of != 0),
            *(exits, starts, self.chars[self.parents[exits]], np.flatnonzero(is_inside).astype(np.int32), copies),
        )
        with self._lock:
            self._sets[symbols] = found
            while len(self._sets) > MAX_SETS:
                self._sets.popitem(last=False)
        return found

    def ends(self, node: int) -> int:
        """A number that identifies what follows a node in the tokens below it: nodes with equal numbers have the same
        endings, and therefore equally many tokens below them, in the same order."""
        found = self._ends.get(node)
        if found is None:
            first, depth = int(self.first[node]), int(self.depth[node])
            below = self.order[first : first + int(self.count[node])].tolist()
            key = tuple(self.tokens[token_id][depth:] for token_id in below)
            found = self._ends[node] = self._kinds_of_ends.setdefault(key, node)
        return found

    def _unlike(self, nodes: Array, chars: Array) -> tuple[Array, Array]:
        """One of the nodes with the same byte, characters and endings, and the ids below this one and the others."""
        kept: dict[tuple[int, ...], int] = {}
        firsts = [
            kept.setdefault((byte, num_chars, self.ends(node)), node)
            for node, byte, num_chars in zip(nodes.tolist(), self.byte[nodes].tolist(), chars.tolist(), strict=True)
        ]
        ids = np.stack([self.ids_below(np.array(firsts, np.int32)), self.ids_below(nodes)])
        return np.array(list(kept.values()), np.int32), ids[:, ids[0] != ids[1]]

    def ids_below(self, nodes: Array) -> Array:
        """The ids of the tokens below ``nodes``, node by node."""
        return self.order[ranges(self.first[nodes], self.count[nodes])]

    def ending_at(self, nodes: Array) -> Array:
        """The ids of the tokens that end at one of ``nodes``."""
        return self.order[ranges(self.first[nodes], self.own[nodes])]

    def below(self, nodes: Array, most: Array) -> Array:
        """The ids of the tokens below ``nodes`` whose rest is plain.

        Args:
            most: ``[nodes]``, the characters that may follow each node.
        """
        counts = self.count[nodes]
        ids = self.ids_below(nodes)
        last = (self.chars[nodes] + np.minimum(most, len(self.chars))).repeat(counts)
        return ids[(self.plain_from[ids] <= self.depth[nodes].repeat(counts)) & (self.token_chars[ids] <= last)]


_ODD_STATE = 1


def _character_steps(usable_bytes: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Reads UTF-8: ``[state, byte]``, the next state. 0: a character has ended; ``_ODD_STATE``: no plain character
    can."""
    spelled = [each for each in PLAIN_SEQUENCES if all(usable_bytes[low : high + 1].any() for low, high in each)]
    states: list[frozenset[Any]] = [frozenset([()]), frozenset()]
    rows = []
    for state in states:  # which grows
        row = []
        for byte in range(256):
            begun = spelled if state == states[0] else state
            if byte < 0x80:
                following = state if state == states[0] else states[_ODD_STATE]
            elif usable_bytes[byte]:
                following = frozenset(each[1:] for each in begun if each[0][0] <= byte <= each[0][1])
            else:
                following = states[_ODD_STATE]
            if following not in states:
                states.append(following)
            row.append(states.index(following))
        rows.append(row)
    return np.array(rows, np.int8)


def _symbols(byte: NDArray[np.uint8], state: NDArray[np.int8]) -> NDArray[np.uint64]:
    """The symbol that each byte ends, as sets of bits: uint64 ``[2, bytes]``."""
    sets = [1 << byte if byte >= FIRST_SYMBOL else ODD for byte in range(128)] + [NOT_ASCII] * 128
    of_byte = np.array([[bits & HALF for bits in sets], [bits >> 64 for bits in sets]], np.uint64)
    return np.where(state == 0, of_byte[:, byte], np.uint64(0))
