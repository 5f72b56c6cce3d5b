"""Which tokens below a node of the trie are plain behind it, so that a free state allows them without a walk.

Introduced in phase 12. The walk over a trie visits every beginning of a token, and inside a string nearly all are
allowed. There it can stop: the tokens below a node are a range, and from each only two numbers matter, the byte from
which on it is plain and its characters.

Invariant: nothing here depends on a grammar.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.grammar.plain import plain_from


@dataclass(frozen=True, eq=False)
class PlainTokens:
    """Of the N nodes of a vocabulary's trie, of which P are the end of a token.

    Attributes:
        first, count: ``[N]``: the ends below a node, itself included, stand in ``ends`` from ``first`` on.
        ends: ``[P]``, nodes, sorted by the bytes of their tokens.
        plain_from: ``[N]``, for the end of a token from which byte on it is plain.
        last_plain_from: ``[N]``, the largest of those below a node.
        chars: ``[N]``, the characters that begin in a node's bytes.
        is_whole: bool ``[N]``: a node's bytes do not end inside a character.
    """

    first: NDArray[Any]
    count: NDArray[Any]
    ends: NDArray[Any]
    plain_from: NDArray[Any]
    last_plain_from: NDArray[Any]
    chars: NDArray[Any]
    is_whole: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        tokens: Sequence[bytes],
        usable_bytes: NDArray[np.bool_],
        node_of: NDArray[np.int32],
        first_child: NDArray[np.int32],
        byte: NDArray[np.uint8],
    ) -> "PlainTokens":
        """Of a vocabulary's tokens and trie: see :class:`shared.grammar.vocabulary.GrammarVocabulary`."""
        size = len(byte)
        parents = np.append(0, np.arange(size).repeat(np.diff(first_child)))
        bounds = [1]
        while bounds[-1] < size:
            bounds.append(int(first_child[bounds[-1]]))
        levels = [slice(*pair) for pair in itertools.pairwise(bounds)]
        is_end = np.zeros(size, np.bool_)
        is_end[node_of] = True
        is_end[0] = False
        ends_at = np.zeros(size, np.int64)
        ends_at[node_of] = plain_from(tokens, usable_bytes)
        ends_at[0] = 0
        chars, missing = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for level in levels:  # `missing` counts the bytes that the last character still needs
            last, parent = byte[level], parents[level]
            continues = (last & 0xC0) == 0x80
            chars[level] = chars[parent] + ~continues
            needed = (last >= 0xC0).astype(np.int64) + (last >= 0xE0) + (last >= 0xF0)
            missing[level] = np.where(continues, np.maximum(missing[parent] - 1, 0), needed)
        count, latest = is_end.astype(np.int64), ends_at.copy()
        for level in reversed(levels):
            np.add.at(count, parents[level], count[level])
            np.maximum.at(latest, parents[level], latest[level])
        first = np.zeros(size, np.int64)
        for level in levels:
            parent, before = parents[level], count[level].cumsum() - count[level]
            eldest = first_child[parent] - level.start
            first[level] = first[parent] + is_end[parent] + before - before[eldest]
        ends = np.flatnonzero(is_end)
        return cls(first, count, ends[np.argsort(first[ends], kind="stable")], ends_at, latest, chars, missing == 0)

    def below(self, nodes: NDArray[Any], depth: int, most: NDArray[Any]) -> NDArray[Any]:
        """The ends below ``nodes``, of ``depth`` bytes each, that are plain from there on.

        Args:
            most: ``[nodes]``, the characters that may follow each.
        """
        counts = self.count[nodes]
        of_node = np.arange(len(nodes)).repeat(counts)
        places = np.arange(len(of_node)) + (self.first[nodes] - counts.cumsum() + counts)[of_node]
        ends = self.ends[places]
        is_plain = self.plain_from[ends] <= depth
        if most.min() < self.chars.max():
            is_plain &= self.chars[ends] - self.chars[nodes][of_node] <= most[of_node]
        return ends[is_plain]
