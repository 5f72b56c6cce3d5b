"""Who holds which block of memory. Introduced in phase 6.

Memory for sequences of unknown length is cut into blocks of equal size, as an operating system cuts its memory into
pages: any free block serves any sequence, so nothing is lost between them (PagedAttention: Kwon et al., SOSP 2023,
arXiv 2309.06180). An allocator hands out numbers and knows nothing of what a block holds.

Every block has at most one owner, which is written down: a block that comes back twice, or from somebody else, is found
when it happens and not in the answers of whoever gets it next. Invariants: a block is on the stack of free ones or has
an owner, never both; a batch is taken or given back as a whole or not at all; a call takes time for its own blocks
alone, however many there are. Which blocks one gets is the same in every run: the last that came back go first.
"""

from collections.abc import Container, Mapping
from typing import Any

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
        self.owners: NDArray[Any] = np.full(num_blocks, None)  # of each block: a request id, or None where it is free

    def allocate(self, owner: str) -> int | None:
        """A free block, which is the owner's from now on; None if there is none."""
        if self.num_free == 0:
            return None
        self.num_free -= 1
        block = int(self.stack[self.num_free])
        self.owners[block] = owner
        return block

    def free(self, block: int, owner: str) -> None:
        """Take a block back from its owner; raises BlockError, with nothing changed, if that is not its owner."""
        refusal = self._refusal(block, owner)
        if refusal is not None:
            raise refusal
        self.owners[block] = None
        self.stack[self.num_free] = block
        self.num_free += 1

    def allocate_many(self, count: int, owner: str) -> Blocks | None:
        """So many free blocks, int32 ``[count]``; None, with nothing changed, if there are fewer."""
        if count < 0:
            raise BlockError(f"{owner} asks for {count} blocks; a count cannot be negative.")
        # exercise 06.1: take blocks from the free list
        # hint: the first num_free entries of the stack are the free blocks; who takes some takes the last of those
        # hint: if there are fewer than count, the answer is None and nothing has changed
        # hint: the topmost goes first, as in calls of allocate; a slice of the stack is a view of it: hand out a copy
        # hint: write down in owners whose they are; an array of block numbers is an index
        if count > self.num_free:
            return None
        self.num_free -= count
        blocks = self.stack[self.num_free : self.num_free + count][::-1].copy()
        self.owners[blocks] = owner
        return blocks
        # end exercise

    def free_many(self, blocks: Blocks, owner: str) -> None:
        """Take blocks back from their owner; raises BlockError, with nothing changed, if one of them is not its own.

        The last comes back first, so that whoever takes as many next gets them in the same order.
        """
        is_block = (blocks >= 0) & (blocks < self.num_blocks)
        if not is_block.all() or not (self.owners[blocks] == owner).all():
            raise next(filter(None, (self._refusal(block, owner) for block in blocks.tolist())))
        if len(np.unique(blocks)) < len(blocks):
            raise BlockError(
                f"{owner} gives back blocks {blocks.tolist()}, one of them twice; a block comes back once."
            )
        self.owners[blocks] = None
        self.stack[self.num_free : self.num_free + len(blocks)] = blocks[::-1]
        self.num_free += len(blocks)

    def leaks(self, live_owners: Container[str]) -> dict[str, Blocks]:
        """The blocks of owners that live no more, by owner: nobody is left to give them back."""
        owners = {owner for owner in self.owners.tolist() if owner is not None and owner not in live_owners}
        return {owner: np.flatnonzero(self.owners == owner).astype(np.int32) for owner in sorted(owners)}

    def audit(self, tables: Mapping[str, Blocks]) -> list[str]:
        """What is wrong, a sentence each; empty if nothing is.

        Args:
            tables: the blocks of each owner as the owners know them; together they shall be those that are held.
        """
        times_free = np.bincount(self.stack[: self.num_free], minlength=self.num_blocks)
        is_held = self.owners != None  # noqa: E711 - of each element
        listed = np.zeros(self.num_blocks, np.int64)
        found = [f"Block {block} is free {times_free[block]} times." for block in np.flatnonzero(times_free > 1)]
        for block in np.flatnonzero((times_free > 0) & is_held):
            found.append(f"Block {block} is free and held by {self.owners[block]}.")
        found += [f"Block {block} is neither free nor held." for block in np.flatnonzero((times_free == 0) & ~is_held)]
        for owner, table in tables.items():
            np.add.at(listed, table, 1)
            for block in table[self.owners[table] != owner]:
                found.append(f"Block {block} stands in the table of {owner} and is held by {self.owners[block]}.")
        found += [f"Block {block} stands in tables {listed[block]} times." for block in np.flatnonzero(listed > 1)]
        for block in np.flatnonzero(is_held & (listed == 0)):
            found.append(f"Block {block} is held by {self.owners[block]} and stands in no table.")
        return found

    def _refusal(self, block: int, owner: str) -> BlockError | None:
        """Why this block cannot come back from this owner; None if it can."""
        if not 0 <= block < self.num_blocks:
            return BlockError(f"{owner} gives back block {block}; there are blocks 0 to {self.num_blocks - 1}.")
        holder = self.owners[block]
        if holder == owner:
            return None
        if holder is None:
            return BlockError(f"{owner} gives back block {block}, which is free already; a block comes back once.")
        return BlockError(f"{owner} gives back block {block}, which {holder} holds; only that one can.")
