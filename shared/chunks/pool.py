"""A paged KV cache pool that also holds chunks. The host side. Introduced in phase 9.1.

A request made of chunks holds blocks for its own tokens only; the chunks' blocks stay with the registry, which counts
the request as their user from its admission to its release. Its tokens number from the first of its first chunk, so the
chunks count as cached tokens, as a prefix would. A request that computes a chunk is a prompt like any other, whose
blocks the registry keeps when it is complete. Neither kind looks into the prefix tree, or enters it: the keys behind a
chunk know another past than their tokens say.

Invariants: those of :class:`shared.cache.prefix.PrefixKVCachePool` for all other requests; free blocks, and those that
the tree, the registry and requests hold, are all blocks.
"""

from collections.abc import Iterable
from typing import Any

from shared.cache.blocks import Blocks
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.planned import PlannedKVCachePool
from shared.cache.planned_layout import AttentionPlanner
from shared.cache.prefix import PrefixKVCachePool
from shared.chunks.layout import ChunkLayout, Range, ranges_of
from shared.chunks.registry import Chunk, ChunkRegistry
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule


class ChunkKVCachePool(PrefixKVCachePool):
    """A pool for chunks, for requests made of them, and for others; the last share prefixes if ``is_sharing``."""

    def __init__(
        self, sizes: PagedSizes, planner: AttentionPlanner | None, registry: ChunkRegistry, is_sharing: bool
    ) -> None:
        super().__init__(sizes, planner)
        self.registry = registry
        registry.join(self.allocator.free, sizes.num_blocks, sizes.block_size)
        self.is_sharing = is_sharing
        self.users: dict[Request, int] = {}  # admitted requests that are made of chunks: the tokens of these
        self.is_ranged = False  # whether the step that is laid out has chunks
        self.known: Any = None  # what the ranges were made of
        self.ranges: tuple[Range, ...] = ()

    def _has_prefix(self, request: Request) -> bool:
        """Whether the prefix tree is for this request."""
        registry = self.registry
        return self.is_sharing and request not in registry.computing and request not in registry.contexts

    def admit(self, request: Request) -> int:
        """See ``CachePoolProtocol``; a request made of chunks becomes their user."""
        if self._has_prefix(request):
            return super().admit(request)
        chunks = self.registry.contexts.get(request, ())
        if chunks:
            self.registry.acquire(chunks)
            self.users[request] = self.registry.context_length(request)
        return self.users.get(request, 0)

    def must_wait(self, request: Request) -> bool:
        """See ``CachePoolProtocol``; a request waits for the chunks that it is made of."""
        return super().must_wait(request) if self._has_prefix(request) else bool(self.registry.missing(request))

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """See ``CachePoolProtocol``; chunks need no reservation."""
        return super().reserve(request, max(0, num_tokens - self.users.get(request, 0)))

    def reserve_next(self, requests: Iterable[Request]) -> list[Request]:
        """See ``CachePoolProtocol``."""
        return list(requests) if self.users else super().reserve_next(requests)

    def _allocate(self, count: int) -> Blocks | None:
        """See :class:`shared.cache.paged.PagedKVCachePool`; evicts chunks if the tree cannot give enough."""
        missing = count - self.allocator.num_free - self.tree.num_unused_blocks
        if 0 < missing <= len(self.registry.unused_blocks()):
            self.registry.evict(missing)
        return super()._allocate(count)

    def allocate(self, count: int) -> Blocks | None:
        """Blocks for a chunk that no request computes; None if there are too few."""
        return self._allocate(count)

    def commit(self, request: Request, num_tokens: int) -> None:
        """See ``CachePoolProtocol``; the blocks of a chunk that is complete are the registry's too."""
        chunk = self.registry.computing.get(request)
        if self.is_sharing and chunk is None and request not in self.users:
            super().commit(request, num_tokens)
            return
        PlannedKVCachePool.commit(self, request, num_tokens)
        if chunk is not None and self.length(request) == len(chunk):
            blocks = self.table(request)
            self.allocator.share(blocks)
            self.registry.store(chunk, blocks)

    def truncate(self, request: Request, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        super().truncate(request, num_tokens - self.users.get(request, 0))

    def shrink(self, request: Request, num_tokens: int) -> None:
        """See ``CachePoolProtocol``."""
        super().shrink(request, num_tokens - self.users.get(request, 0))

    def release(self, request: Request) -> None:
        """See ``CachePoolProtocol``; the chunks stay."""
        if request in self.users:
            del self.users[request]
            self.registry.release(self.registry.contexts[request])
        super().release(request)

    def length(self, request: Request) -> int:
        """See ``CachePoolProtocol``; the chunks of an admitted request count."""
        return super().length(request) + self.users.get(request, 0)

    @property
    def free_tokens(self) -> int:
        """See ``CachePoolProtocol``; chunks that no request uses count as free."""
        return super().free_tokens + len(self.registry.unused_blocks()) * self.block_size

    @property
    def used_tokens(self) -> int:
        """See ``CachePoolProtocol``; a chunk counts once."""
        return super().used_tokens + self.registry.used_tokens()

    def layout(self, schedule: Schedule) -> PagedLayout:
        """See ``CachePoolProtocol``."""
        contexts: tuple[tuple[Chunk, ...], ...] = ()
        if self.users:
            contexts = tuple([self.registry.contexts.get(request, ()) for request in schedule.requests])
        self.is_ranged = any(contexts)
        layout = super().layout(schedule)
        if not self.is_ranged:
            return layout
        known = contexts, self.registry.num_evictions
        if known != self.known:  # the same ranges are the same object, so that views need not plan again
            self.known, self.ranges = known, ranges_of(contexts)
        return ChunkLayout.ranged(layout, self.ranges)

    def _planner(self) -> AttentionPlanner | None:
        """See ``PlannedKVCachePool``; attention over ranges is planned by the view."""
        return None if self.is_ranged else super()._planner()

    def cached_blocks(self) -> list[int]:
        """See ``CachePoolProtocol``."""
        return [*super().cached_blocks(), *self.registry.unused_blocks().tolist()]

    def drop_cached(self) -> None:
        """See ``CachePoolProtocol``; the chunks stay known."""
        super().drop_cached()
        self.registry.evict(self.allocator.num_blocks)

    def audit_blocks(self) -> list[str]:
        """See :class:`shared.cache.paged.PagedKVCachePool`; the registry too."""
        return super().audit_blocks() + self.registry.audit(self.users)

    def _block_lists(self) -> list[Blocks]:
        return [*super()._block_lists(), self.registry.blocks()]
