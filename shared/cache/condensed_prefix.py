"""A KV cache pool whose requests share prefixes until they are compressed. The host side. Introduced in phase 9.2.

Until its first compression a request has the keys and values of all its tokens, so its full blocks enter the prefix
tree and other requests read them. A compression reads these blocks and writes others: the tree keeps its own, as when
a request ends. What the request computes from then on depends on what was dropped, so it never enters the tree.

The queries of the last tokens before the first compression decide what is kept. They are not in the tree, so a request
computes these tokens itself, whatever is cached: it keeps what it would keep alone.

Invariants: those of both pools, but the first compression may take blocks, if other requests hold those of the prefix;
the tree has no block that is packed, and none that was computed behind a compression.
"""

from collections.abc import Callable

import numpy as np

from shared.cache.condensed import CondensedKVCachePool
from shared.cache.condensed_layout import Cells, Packed
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.prefix import PrefixKVCachePool
from shared.engine.request import Request


class CondensedPrefixKVCachePool(CondensedKVCachePool, PrefixKVCachePool):
    """A pool with a prefix tree and compressed requests.

    Args:
        num_shareable: the tokens of a request, from the first, whose queries no compression needs.
    """

    def __init__(self, cells: Cells, sizes: PagedSizes, num_shareable: Callable[[Request], int]) -> None:
        PrefixKVCachePool.__init__(self, sizes, None)
        self.cells, self.packed, self.num_shareable = cells, {}, num_shareable

    def shareable(self, request: Request) -> bytes:
        """See :class:`shared.cache.prefix.PrefixKVCachePool`; less than all known tokens, so no block is copied."""
        num_tokens = min(self.num_shareable(request), request.num_tokens - 1)
        return super().shareable(request)[: max(num_tokens, 0) // self.block_size * self.tree.block_bytes]

    def commit(self, request: Request, num_tokens: int) -> None:
        """See ``CachePoolProtocol``; blocks of a compressed request do not enter the tree."""
        if request in self.packed:
            PagedKVCachePool.commit(self, request, num_tokens)
        else:
            super().commit(request, num_tokens)

    def compress(self, request: Request, packed: Packed) -> int | None:
        """See :class:`shared.cache.compressing.CompressingPool`; the number may be negative the first time."""
        row, prefix = self._row(request), self.prefixes.get(request)
        if prefix is None:
            return super().compress(request, packed)
        before, held = self.free_tokens, self.tables[row, : self.num_held[row]].copy()
        shared, own = held[: prefix.num_shared], held[prefix.num_shared :]
        needed = self.blocks_for(packed.num_slots + self.granted[row] - self.lengths[row])
        if needed - len(own) > before // self.block_size + self.tree.num_alone(prefix.node):
            return None
        del self.prefixes[request]
        self.tree.release(prefix.node)
        self._forget_computing(request, prefix)
        self.allocator.free(shared)  # whatever they hold can still be read: no step runs before it has been moved
        more = self._allocate(max(needed - len(own), 0))
        assert more is not None, "counted above"
        self.tables[row, : len(own) + len(more)] = np.concatenate([own, more])
        self.num_held[row] = len(own) + len(more)
        super().compress(request, packed)
        return (self.free_tokens - before) // self.block_size

    def audit_blocks(self) -> list[str]:
        """See :class:`shared.cache.paged.PagedKVCachePool`; the tree has no block of a compressed request."""
        in_tree = set(self.tree.blocks().tolist())
        return super().audit_blocks() + [
            f"Request {request.request_id} is compressed and its blocks {sorted(both)} are in the prefix tree."
            for request in self.packed
            if (both := in_tree & set(self.table(request).tolist()))
        ]
