"""Compressed requests in a paged KV cache pool. The host side. Introduced in phase 9.2.

A compressed request holds fewer slots than it has tokens. Scheduler and request count all tokens, dropped or not; the
pool subtracts the saved slots (``num_slotless``). It holds whole blocks, like any request.

Until its first compression, a request has the keys and values of all its tokens, so it shares its prefix (phase 8) if
prefix caching is on. A compression reads the tree's blocks and writes to other blocks; the tree keeps its own, as when
a request ends. Later keys depend on the dropped tokens, so they never enter the tree. The queries of the last tokens
before the first compression determine what is kept. The tree does not hold queries, so a request always recomputes
these tokens. It therefore keeps the same keys as it would alone.

Invariants: those of the pool and the tree, with slots in place of tokens. A compressed request wastes less than one
block of its packed part. A compression allocates no block, except the first one if other requests hold the prefix's
blocks. Reserved but unwritten slots stay reserved. The tree has no packed block, and no block computed after a
compression.
"""

from dataclasses import replace
from typing import cast

import numpy as np

from shared.cache.layout.paged import PagedLayout
from shared.cache.pool.blocks import Blocks
from shared.cache.pool.extension import BlockTables, PoolExtension
from shared.cache.pool.prefix import PrefixSharing
from shared.engine.request import Request
from shared.errors import CapacityError
from shared.scheduling.schedule import Schedule
from shared.tracks.compression.layout import Cells, Holding, LayoutPacked, Packed


class CompressedRequests:
    """The blocks of compressed requests; see :class:`shared.cache.pool.extension.PoolExtension`.

    Args:
        sharing: how requests share prefixes until they are compressed.
    """

    def __init__(self, cells: Cells, sharing: PoolExtension) -> None:
        self.cells, self.sharing, self.prefixes = cells, sharing, sharing.prefixes
        self.packed: dict[Request, Packed] = {}  # for the compressed requests
        self.admit, self.must_wait, self.allocate = sharing.admit, sharing.must_wait, sharing.allocate
        self.commit = sharing.commit  # a compressed request has left the tree
        self.context_length, self.used_tokens = sharing.context_length, sharing.used_tokens
        self.num_unused_blocks, self.unused_blocks = sharing.num_unused_blocks, sharing.unused_blocks
        self.drop_unused, self.block_lists = sharing.drop_unused, sharing.block_lists

    def holding(self, pool: BlockTables, request: Request, num_in_flight: int = 0) -> Holding:
        """A request's committed tokens, and those of the step in flight."""
        row = pool.rows[request]
        length = pool.lengths[row] + num_in_flight
        table: Blocks = pool.tables[row, : pool.blocks_for(length)].copy()
        return Holding(row, table, length, self.packed.get(request))

    def compress(self, pool: BlockTables, request: Request, packed: Packed) -> int | None:
        """Account for what is kept of a request. Returns the number of blocks that this frees, or None if there is no
        space.

        The number may be negative the first time, if other requests hold the prefix's blocks.
        """
        row, before = pool.rows[request], pool.free_tokens
        reserved = pool.granted[row] - pool.lengths[row]
        if request in self.sharing.prefixes:
            needed = pool.blocks_for(packed.num_slots + reserved)
            if not self._leave_tree(cast(PrefixSharing, self.sharing), pool, request, needed):
                return None
        self.packed[request], pool.laid_out = packed, None
        if not packed.num_slots:
            return 0
        pool.num_slotless[request] = packed.num_tokens - packed.num_slots
        pool.lengths[row], pool.granted[row] = packed.num_slots, packed.num_slots + reserved
        held, needed = pool.num_held[row], pool.blocks_for(pool.granted[row])
        pool.allocator.free(pool.tables[row, needed:held])
        pool.num_held[row] = needed
        return (pool.free_tokens - before) // pool.block_size

    @staticmethod
    def _leave_tree(sharing: PrefixSharing, pool: BlockTables, request: Request, needed: int) -> bool:
        """Ensure that a request has at least ``needed`` blocks of its own; False, and no change, if there is no
        space."""
        row, prefix = pool.rows[request], sharing.prefixes[request]
        held = pool.tables[row, : pool.num_held[row]].copy()
        shared, own = held[: prefix.num_shared], held[prefix.num_shared :]
        if needed - len(own) > pool.free_tokens // pool.block_size + sharing.tree.num_alone(prefix.node):
            return False
        sharing.release(request)
        pool.allocator.free(shared)  # their content can still be read: no step runs before the tokens have been moved
        more = sharing.allocate(pool, max(needed - len(own), 0))
        assert more is not None, "counted above"
        pool.tables[row, : len(own) + len(more)] = np.concatenate([own, more])
        pool.num_held[row] = len(own) + len(more)
        return True

    def check_truncation(self, request: Request, num_tokens: int) -> None:
        """Compressed tokens cannot be dropped one by one."""
        packed = self.packed.get(request)
        if packed is not None and num_tokens < packed.num_tokens:
            raise CapacityError(
                f"Request {request.request_id} cannot be truncated to {num_tokens} tokens: of its first "
                f"{packed.num_tokens} some were dropped."
            )
        self.sharing.check_truncation(request, num_tokens)

    def release(self, request: Request) -> None:
        self.packed.pop(request, None)
        self.sharing.release(request)

    def lay_out(self, pool: BlockTables, schedule: Schedule, layout: PagedLayout) -> PagedLayout:
        layout = self.sharing.lay_out(pool, schedule, layout)
        return replace(layout, extra=LayoutPacked(tuple([self.packed.get(one) for one in schedule.requests])))

    def audit(self, pool: BlockTables) -> list[str]:
        """Includes the packed parts, whose blocks are not in the tree."""
        found, in_tree = self.sharing.audit(pool), {block for each in self.block_lists() for block in each.tolist()}
        for request, packed in self.packed.items():
            if request not in pool.rows:
                found.append(f"Request {request.request_id} is compressed and holds no blocks.")
                continue
            if packed.num_slots not in (0, self.cells.slots_for(packed.counts)):
                found.append(
                    f"Request {request.request_id} has a packed part of {packed.num_slots} slots and its "
                    f"{packed.total} kept tokens fill {self.cells.slots_for(packed.counts)}."
                )
            row = pool.rows[request]
            if both := in_tree & {*pool.tables[row, : pool.num_held[row]].tolist()}:
                found.append(
                    f"Request {request.request_id} is compressed and its blocks {sorted(both)} are in the prefix tree."
                )
        return found
