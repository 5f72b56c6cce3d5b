"""A reference-counting allocator of KV cache blocks. Introduced in phase 6.

The KV cache is divided into blocks of equal size, as an operating system divides memory into pages: any free block
serves any sequence, so there is no external fragmentation (PagedAttention: Kwon et al., SOSP 2023, arXiv 2309.06180).
The allocator hands out block numbers and counts references; it does not know what a block contains or which request
holds it. A block is freed when its reference count drops to 0, so sequences with a common prefix can share blocks.

Invariants: a block is on the free list or has a reference count above 0, never both; a call allocates or frees all its
blocks or none; the time of a call depends only on the number of its own blocks. Allocation is deterministic: the most
recently freed blocks are allocated first.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shared.errors import BlockError, ConfigError

Blocks = NDArray[np.int32]


class BlockAllocator:
    """Blocks 0 to ``num_blocks - 1``, initially free. Raises ConfigError if ``num_blocks`` is below 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"The number of blocks is {num_blocks}; it must be at least 1.")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.stack: Blocks = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # its first `num_free` are free
        self.ref_counts: Blocks = np.zeros(num_blocks, np.int32)  # of each block; 0 if the block is free

    def allocate(self, count: int) -> Blocks | None:
        """Allocate ``count`` blocks, int32 ``[count]``, each with one reference.

        Returns None, and changes nothing, if fewer are free.
        """
        if count < 0:
            raise BlockError(f"{count} blocks were requested; a count cannot be negative.")
        # exercise 06x1: take blocks from the free list
        # hint: the first num_free entries of the stack are the free blocks; take the last of those
        # hint: if fewer than count are free, return None and change nothing
        # hint: the top of the stack comes first, as if popped one by one; a slice of the stack is a view: copy it
        # hint: set their reference counts to 1: an array of block numbers indexes ref_counts
        if count > self.num_free:
            return None
        self.num_free -= count
        blocks = self.stack[self.num_free : self.num_free + count][::-1].copy()
        self.ref_counts[blocks] = 1
        return blocks
        # end exercise

    def share(self, blocks: Blocks) -> None:
        """Add a reference to each block; raises BlockError, and changes nothing, if one is free."""
        self.ref_counts[self._held(blocks)] += 1

    def free(self, blocks: Blocks) -> None:
        """Drop a reference to each block; blocks without references become free.

        Blocks are pushed in reverse, so the next allocation of the same size gets them in the same order. Raises
        BlockError, and changes nothing, if a block is free already.
        """
        self.ref_counts[self._held(blocks)] -= 1
        freed = blocks[self.ref_counts[blocks] == 0][::-1]
        self.stack[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def audit(self, tables: Iterable[Blocks]) -> list[str]:
        """Check the invariants; returns one message per violation.

        Args:
            tables: the block table of each holder; together they must list each block as often as it is referenced.
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
                f"Block {block} has {self.ref_counts[block]} references and is in {listed[block]} block tables: "
                f"{'it leaks' if self.ref_counts[block] > listed[block] else 'it can be allocated while in use'}."
            )
        return found

    def _held(self, blocks: Blocks) -> Blocks | int:
        """The held blocks as an index into ``ref_counts``; raises BlockError for any other block, and for a
        duplicate."""
        if len(blocks) == 1 and 0 <= (block := blocks.item()) < self.num_blocks and self.ref_counts.item(block):
            return block  # a block that has just been filled, as in most steps
        if len(blocks):
            in_order = np.sort(blocks)
            for block in (in_order.item(0), in_order.item(-1)):
                if not 0 <= block < self.num_blocks:
                    raise BlockError(f"There is no block {block}; blocks are 0 to {self.num_blocks - 1}.")
            counts: Blocks = self.ref_counts[blocks]
            if not counts.all():
                raise BlockError(f"Block {blocks[counts == 0][0]} is free already; each holder frees a block once.")
            if (in_order[1:] == in_order[:-1]).any():
                raise BlockError(f"Blocks {blocks.tolist()} contain a duplicate; a holder holds a block once.")
        return blocks
