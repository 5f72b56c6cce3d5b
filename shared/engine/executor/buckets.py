"""The sizes of captured steps. Introduced in phase 9.

A CUDA graph replays launches of fixed sizes, so there is a graph for each of a few sizes, the *buckets*, and a step is
padded to the smallest bucket that holds it. More buckets waste less on padding, but each costs memory and start-up
time.

Invariants: the largest bucket of decode steps is the maximum batch, so a full batch never runs eagerly; a padding token
has no slot and belongs to no sequence.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self


class Bucket(NamedTuple):
    """The size of a captured step. In a decode step each sequence has one token."""

    num_tokens: int
    num_sequences: int  # the maximum; in a mixed step also the maximum of decoding sequences
    is_decode: bool
    tile_rows: int = 0  # segments for attention over ranges of keys (phase 9.1); 0: each sequence has only its own keys


@dataclass(frozen=True)
class Buckets:
    """The buckets of an engine, ascending."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    is_required: bool = False  # whether it is an error if these steps cannot be captured

    @classmethod
    def of(cls, max_sequences: int, max_tokens: int) -> Self:
        """Buckets for decode steps of up to ``max_sequences`` and mixed steps of up to ``max_tokens``."""
        # exercise 09x1: choose the sizes
        # hint: decode steps of 1, 2, 4 and 8 sequences, then every 8th up to 64, every 16th up to 128, every 32nd
        # hint: max_sequences is a size too: what would a full batch do without?
        # hint: leave the sizes, ascending, in `decode`
        decode = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_sequences, 32)]
        decode = [size for size in decode if size < max_sequences] + [max_sequences]
        # end exercise
        mixed = [16, 32, 48, *range(64, 256, 32), *range(256, 512, 64), *range(512, max_tokens, 128)]
        mixed = [size for size in mixed if size < max_tokens] + [max_tokens]
        return cls(
            tuple(Bucket(size, size, True) for size in decode),
            tuple(Bucket(size, min(size, max_sequences), False) for size in mixed),
        )

    def smallest(self, num_sequences: int, num_tokens: int) -> Bucket | None:
        """The smallest bucket that holds a step; None: it is larger than any bucket."""
        is_decode = num_tokens == num_sequences
        buckets, sizes = (self.decode, self.sizes[0]) if is_decode else (self.mixed, self.sizes[1])
        index = bisect_left(sizes, num_tokens)
        return buckets[index] if index < len(buckets) else None

    @cached_property
    def sizes(self) -> tuple[list[int], list[int]]:
        """The tokens of each decode bucket, and of each mixed one."""
        return [bucket.num_tokens for bucket in self.decode], [bucket.num_tokens for bucket in self.mixed]
