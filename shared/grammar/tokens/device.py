"""What kernels need from a vocabulary and from configurations, as numbers at fixed addresses. Introduced in phase 12.

Tokens are sorted so that neighbours share a prefix and the threads of a program follow nearly the same path. The few
tokens that contain a quote, a backslash, a control character or part of a character come first; in a free state, all
tokens after them are allowed without a walk.

Invariant: a token's index never changes; packing and unpacking a configuration restores it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.errors import ConfigError
from shared.grammar.automata.automaton import MAX_DEPTH, Configuration, Integers
from shared.grammar.automata.plain import plain_from
from shared.grammar.tokens.vocabulary import GrammarVocabulary

GROUP = 32  # token indices whose bits share a word; plain tokens begin at a multiple of it
NUM_ALIKE = 2  # bytes that tokens are sorted by, before their length; as many as a group's prefix holds
NEVER, AT_END = -1, -2  # instead of a rank
LENGTH_BITS = 10
LONGEST = (1 << LENGTH_BITS) - 1
HALF = (1 << 32) - 1
# The offsets of the numbers in a row.
BASE = 0  # offset of the row's grammar tables; -1 without a grammar
STATE, FEWEST, MOST, BLANKS = 1, 2, 3, 4
HEIGHT = 5  # of the stack
SEEN = 6  # two numbers, low half first
FRAMES = 8
SEENS = FRAMES + MAX_DEPTH  # two numbers per frame
KEPT = SEENS + 2 * MAX_DEPTH  # 1 if the allowed tokens stay the same, so that the row keeps its mask
ROW = KEPT + 1


@dataclass(frozen=True, eq=False)
class GrammarTokens:
    """A vocabulary's tokens on a device, at N indices.

    Attributes:
        text: uint8, the bytes of all tokens, each followed by a zero, and padding that walks read beyond the last.
        starts: int32 ``[N]``, the offset of each token in it.
        packed: int32 ``[N]``: ``chars << 20 | plain_from << 10 | length``; 0 where there is no token.
        ranks: int32 ``[V]``, the index of an id's token; ``NEVER`` or ``AT_END``.
        ids: int32 ``[V, 2]``: where the bytes of each id begin, and their number.
        prefixes: int32 ``[N / GROUP]``: ``second << 8 | first``, the first two bytes of all tokens in a group of
            indices; a second byte of 0 if that differs or a token has none, -1 if the first differs.
        first_plain: from this index on all tokens are plain.
        longest: bytes of the longest token.
    """

    text: torch.Tensor
    starts: torch.Tensor
    packed: torch.Tensor
    ranks: torch.Tensor
    ids: torch.Tensor
    prefixes: torch.Tensor
    first_plain: int
    longest: int

    @classmethod
    def of(cls, vocabulary: GrammarVocabulary, device: torch.device | str) -> "GrammarTokens":
        """Raises ConfigError for a token of more than ``LONGEST`` bytes."""
        if vocabulary.longest > LONGEST:
            raise ConfigError(
                f"A token of the vocabulary has {vocabulary.longest} bytes; grammars on a GPU take up to {LONGEST}."
            )
        distinct = {token for token in vocabulary.tokens if token}
        tokens = sorted(distinct, key=lambda token: (token[:NUM_ALIKE], len(token), token))
        plain = plain_from(tokens, vocabulary.usable_bytes)
        lengths = np.array([len(token) for token in tokens], np.int32)
        text = np.frombuffer(b"\0".join(tokens) + bytes(4 + vocabulary.longest), np.uint8)
        starts = (np.cumsum(lengths + 1) - lengths - 1).astype(np.int32)
        begun = np.concatenate([[0], np.cumsum((text & 0xC0) != 0x80)])
        chars = begun[starts + lengths] - begun[starts]
        packed = (chars << 2 * LENGTH_BITS | plain << LENGTH_BITS | lengths).astype(np.int32)
        rest, plains = np.flatnonzero(plain > 0), np.flatnonzero(plain == 0)
        first_plain = -(-len(rest) // GROUP) * GROUP
        size = first_plain + -(-len(plains) // GROUP) * GROUP
        indices = np.zeros(len(tokens), np.int32)
        indices[rest], indices[plains] = np.arange(len(rest)), first_plain + np.arange(len(plains))
        starts_at, packed_at = np.zeros(size, np.int32), np.zeros(size, np.int32)
        starts_at[indices], packed_at[indices] = starts, packed
        first, second = (_shared(text[starts_at + n].astype(np.int32), packed_at > 0) for n in range(NUM_ALIKE))
        number = {token: n for n, token in enumerate(tokens)}
        numbers = np.array([number.get(token, -1) for token in vocabulary.tokens], np.int32)
        ranks = np.where(numbers < 0, NEVER, indices[numbers])
        ranks[list(vocabulary.end_ids)] = AT_END
        ids = np.where(numbers[:, None] < 0, 0, np.column_stack([starts, lengths])[numbers])

        def upload(array: Integers) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        return cls(
            text=torch.from_numpy(text.copy()).to(device),
            starts=upload(starts_at),
            packed=upload(packed_at),
            ranks=upload(ranks),
            ids=upload(ids),
            prefixes=upload(np.where(first < 0, -1, np.maximum(second, 0) << 8 | first)),
            first_plain=first_plain,
            longest=vocabulary.longest,
        )

    @property
    def num_words(self) -> int:
        """The int32 words of a row's bits: one per group of indices, and one that says whether the text may end."""
        return len(self.starts) // GROUP + 1


def _shared(numbers: Integers, is_token: NDArray[np.bool_]) -> Integers:
    """The number that all tokens in a group of indices have; -1 if they differ."""
    groups = numbers.reshape(-1, GROUP)
    is_alike = ((groups == groups[:, :1]) | ~is_token.reshape(-1, GROUP)).all(1)
    return np.where(is_alike, groups[:, 0], -1)


def pack_row(base: int, now: Configuration) -> Integers:
    """A row for the kernels: int32 ``[ROW]``; ``base`` is the offset of its grammar's tables."""
    row = np.zeros(ROW, np.uint32)
    row[:SEEN] = base, now.state, now.fewest, now.most, now.blanks, len(now.stack)
    seen = [now.seen, *(seen for _, seen in now.stack)]
    halves = np.array([(keys & HALF, keys >> 32) for keys in seen], np.uint32)
    row[SEEN:FRAMES] = halves[0]
    row[FRAMES:][: len(now.stack)] = [frame for frame, _ in now.stack]
    row[SEENS:][: 2 * len(now.stack)] = halves[1:].reshape(-1)
    return row.view(np.int32)


def unpack_row(row: Integers) -> tuple[int, Configuration]:
    """A row's base and configuration."""
    base, state, fewest, most, blanks, height = row[:SEEN].tolist()
    numbers = row.view(np.uint32)
    seen = [int(low) | int(high) << 32 for low, high in numbers[SEENS:KEPT].reshape(-1, 2)[:height]]
    low, high = numbers[SEEN:FRAMES].tolist()
    frames = row[FRAMES:][:height].tolist()
    return base, Configuration(state, fewest, most, blanks, low | high << 32, tuple(zip(frames, seen, strict=True)))
