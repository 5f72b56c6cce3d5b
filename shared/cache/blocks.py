"""Which blocks of memory are held, and how many times. Introduced in phase 6.

Memory for sequences of unknown length is cut into blocks of equal size, as an operating system cuts its memory into
pages: any free block serves any sequence, so nothing is lost between them (PagedAttention: Kwon et al., SOSP 2023,
arXiv 2309.06180). An allocator hands out numbers and knows nothing of what a block holds, nor by whom it is held: it
counts its holders. A block of one holder comes back when that one gives it up; a block that several share, as sequences
with a common beginning can, when the last one does.

Invariants: a block is on the stack of free ones or has a count above 0, never both; a batch of blocks is taken or given
back as a whole or not at all; a call takes time for its own blocks alone, however many there are. Which blocks one gets
is the same in every run: the last that came back go first.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.errors import BlockError, ConfigError

Blocks = NDArray[np.int32]


class BlockAllocator:
    """Blocks 0 to ``num_blocks - 1``, all free at first. Raises ConfigError if there is none."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"The number of blocks is {num_blocks}; it must be at least 1.")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.stack: Blocks = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # its first `num_free` are free
        self.ref_counts: Blocks = np.zeros(num_blocks, np.int32)  # holders of each block; 0 where it is free

    def allocate(self, count: int) -> Blocks | None:
        """So many free blocks, int32 ``[count]``, of one holder each; None, with nothing changed, if there are not."""
        if count < 0:
            raise BlockError(f"{count} blocks are asked for; a count cannot be negative.")
        # exercise 06x1: take blocks from the free list
        # hint: the first num_free entries of the stack are the free blocks; who takes some takes the last of those
        # hint: if there are fewer than count, the answer is None and nothing has changed
        # hint: the topmost goes first, as if they were taken one by one; a slice of the stack is a view of it: copy it
        # hint: each has one holder from now on: an array of block numbers is an index of ref_counts
        if count > self.num_free:
            return None
        self.num_free -= count
        blocks = self.stack[self.num_free : self.num_free + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks
        # end exercise

    def share(self, blocks: Blocks) -> None:
        """Count one more holder of each; raises BlockError, with nothing changed, for one that is free."""
        self._check_held(blocks)
        self.ref_counts[blocks] += 1

    def free(self, blocks: Blocks) -> None:
        """Count one holder less of each; those that have none left are free.

        The last comes back first, so that a request that takes as many next gets them in the same order. Raises
        BlockError, with nothing changed, for a block that is free already.
        """
        self._check_held(blocks)
        self.ref_counts[blocks] -= 1
        freed = blocks[self.ref_counts[blocks] == 0][::-1]
        self.stack[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def audit(self, tables: Iterable[Blocks]) -> list[str]:
        """What is wrong, a sentence each; empty if nothing is.

        Args:
            tables: the blocks of each holder as the holders know them; together they shall be those that are held.
        """
        times_free = np.bincount(self.stack[: self.num_free], minlength=self.num_blocks)
        listed = np.zeros(self.num_blocks, np.int64)
        for table in tables:
            np.add.at(listed, table, 1)
        is_held = self.ref_counts > 0
        found = [f"Block {block} is free {times_free[block]} times." for block in np.flatnonzero(times_free > 1)]
        found += [f"Block {block} is free and held." for block in np.flatnonzero((times_free > 0) & is_held)]
        found += [f"Block {block} is neither free nor held." for block in np.flatnonzero((times_free == 0) & ~is_held)]
        for block in np.flatnonzero(self.ref_counts != listed):
            found.append(
                f"Block {block} has {self.ref_counts[block]} holders and stands in {listed[block]} tables: "
                f"{'it is lost' if self.ref_counts[block] > listed[block] else 'it can be granted again'}."
            )
        return found

    def _check_held(self, blocks: Blocks) -> None:
        is_block = (blocks >= 0) & (blocks < self.num_blocks)
        if not is_block.all():
            raise BlockError(f"There is no block {blocks[~is_block][0]}; there are blocks 0 to {self.num_blocks - 1}.")
        if not (self.ref_counts[blocks] > 0).all():
            block = blocks[self.ref_counts[blocks] == 0][0]
            raise BlockError(f"Block {block} is free already; a block is given back once by each holder.")
        if len(np.unique(blocks)) < len(blocks):
            raise BlockError(f"Of blocks {blocks.tolist()} one is named twice; a holder holds a block once.")
