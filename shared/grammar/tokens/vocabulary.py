"""A vocabulary as grammars see it: the bytes of each token, as a trie. Introduced in phase 12.

An automaton reads bytes and a model samples tokens, so a mask needs the bytes of every token. Tokens with a common
prefix share its walk, since the trie holds each prefix once.

Special tokens have no text. Here their bytes are a byte that UTF-8 never uses, followed by their name; a grammar allows
only those that it names.

Invariants: tokens without bytes, and those that end an output, are not in the trie; nodes are numbered level by level,
and the children of a node are adjacent.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shared.grammar.tokens.plain_tokens import PlainTokens
from shared.text.tokenizer import Tokenizer

Nodes = NDArray[np.int32]
SPECIAL_BYTE = 0xFF
"""The first byte of special tokens; other tokens that contain it are not in the trie, since no text contains it."""
MAX_OPENED = 4
"""Maximum frames that one token may push and leave open, since the kernel that walks tokens has registers for this
many. Tokens with as many opening brackets, after which a quote may open one more, are never allowed: shorter tokens can
spell them."""


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """V tokens, as a trie of N nodes, with root 0.

    Attributes:
        tokens: the bytes of each id; b"" for those that no grammar allows.
        end_ids: the ids that end an output.
        node_of: int32 ``[V]``, the node at which each token ends; 0 for those without bytes.
        first_child: int32 ``[N + 1]``: the children of node n are ``first_child[n]`` to ``first_child[n + 1]``.
        byte_of: uint8 ``[N]``, the byte that leads to each node.
        longest: bytes of the longest token.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]
    node_of: Nodes
    first_child: Nodes
    byte_of: NDArray[np.uint8]
    longest: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Self:
        """The vocabulary of a model whose logits have ``vocab_size`` columns; takes about 0.3 s for 128,000 tokens."""
        known = min(vocab_size, tokenizer.vocab_size)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(known)] + [b""] * (vocab_size - known)
        tokens = [b"" if SPECIAL_BYTE in token else token for token in tokens]
        for name in tokenizer.special_tokens:
            token_id = tokenizer.token_id(name)
            if token_id is not None and token_id < known:
                tokens[token_id] = bytes([SPECIAL_BYTE]) + name.encode()
        return cls.of_tokens(tokens, sorted(token_id for token_id in tokenizer.eos_ids if token_id < vocab_size))

    @classmethod
    def of_tokens(cls, tokens: Sequence[bytes], end_ids: Sequence[int]) -> Self:
        """The vocabulary of tokens with these bytes; b"" is a token that no grammar allows."""
        banned = set(end_ids)
        tokens = [
            b"" if token_id in banned or token.count(b"[") + token.count(b"{") >= MAX_OPENED else token
            for token_id, token in enumerate(tokens)
        ]
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        lengths = np.array([len(tokens[token_id]) for token_id in order])
        longest = int(lengths.max(initial=0))
        # Sorted tokens as a matrix: a node begins where a prefix differs from that of the previous row.
        matrix = np.zeros((len(tokens), longest), np.uint8)
        joined = np.frombuffer(b"".join(tokens[token_id] for token_id in order), np.uint8)
        matrix[np.arange(longest) < lengths[:, None]] = joined
        is_new = np.zeros(len(tokens), bool)
        is_new[:1] = True
        at = np.zeros(len(tokens), np.int32)  # the node of each row's prefix
        node_of = np.zeros(len(tokens), np.int32)
        parents, byte_of, total = [np.zeros(0, np.int32)], [np.zeros(1, np.uint8)], 1
        for depth in range(longest):
            is_longer = lengths > depth
            is_new[1:] |= matrix[1:, depth] != matrix[:-1, depth]
            is_new[1:] |= ~is_longer[:-1] & is_longer[1:]
            starts = is_new & is_longer
            parents.append(at[starts])
            byte_of.append(matrix[starts, depth])
            at = np.where(is_longer, total + np.cumsum(starts) - 1, at).astype(np.int32)
            total += int(starts.sum())
            is_new &= is_longer
        node_of[order] = at
        num_children = np.bincount(np.concatenate(parents), minlength=total)
        first_child = np.append(1, 1 + num_children.cumsum()).astype(np.int32)
        return cls(tokens, tuple(end_ids), node_of, first_child, np.concatenate(byte_of), longest)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def usable_bytes(self) -> NDArray[np.bool_]:
        """bool ``[256]``: the bytes that have their own token. A grammar that needs any other byte may never
        end."""
        usable = np.zeros(256, bool)
        usable[[token[0] for token in self.tokens if len(token) == 1]] = True
        return usable

    @cached_property
    def plain(self) -> PlainTokens:
        """The tokens that looping states allow without a walk."""
        return PlainTokens.of(self.tokens, self.usable_bytes, self.node_of, self.first_child, self.byte_of)

    @cached_property
    def text(self) -> bytes:
        """``byte_of`` in pieces, which are faster to search."""
        return self.byte_of.tobytes()

    @cached_property
    def longest_digits(self) -> int:
        """The longest run of digits in a token."""
        return max(map(len, re.findall(rb"[0-9]+", b" ".join(self.tokens))), default=0)

    def children(self, node: int) -> list[tuple[int, int]]:
        """The byte and the node of each child."""
        first, last = self.first_child[node : node + 2].tolist()
        return list(zip(self.byte_of[first:last].tolist(), range(first, last), strict=True))

    @cached_property
    def ids_of(self) -> dict[int, list[int]]:
        """The ids of the tokens that end at each node."""
        found: dict[int, list[int]] = {}
        for token_id in np.flatnonzero(self.node_of).tolist():
            found.setdefault(int(self.node_of[token_id]), []).append(token_id)
        return found
