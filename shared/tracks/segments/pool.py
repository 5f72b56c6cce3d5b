"""Segments in a paged KV cache pool. The host side. Introduced in phase 9.1.

A request made of segments holds blocks for its own tokens only; the segments' blocks belong to the registry, which
counts the request as their user from admission to release. Its tokens are numbered from the first token of its first
segment, so segments count as cached tokens, as a prefix would. A request that computes a segment is an ordinary prompt,
and the registry keeps its blocks once it is complete. Neither kind matches or enters the prefix tree: keys after a
segment were computed with a context that their tokens do not imply.

Invariants: those of :class:`shared.cache.pool.prefix.PrefixSharing` for all other requests; the free blocks and those
held by the tree, the registry and requests add up to all blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shared.cache.layout.paged import PagedLayout, PagedSizes, as_it_is
from shared.cache.pool.blocks import Blocks
from shared.cache.pool.extension import BlockTables, PoolExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule
from shared.tracks.segments.layout import LayoutRanges, Range, ranges_of
from shared.tracks.segments.registry import Segment, SegmentRegistry


def segment_pool(
    sizes: PagedSizes,
    registry: SegmentRegistry,
    is_sharing: bool,
    lay_out: Callable[[PagedLayout], PagedLayout] = as_it_is,
) -> PagedKVCachePool:
    """A pool for segments, for requests made of them, and for other requests, which share prefixes if
    ``is_sharing``."""
    pool = PagedKVCachePool.of(sizes, SegmentSharing(registry, PrefixSharing(sizes.block_size), is_sharing), lay_out)
    registry.join(pool.allocator.free, sizes.num_blocks, sizes.block_size)
    return pool


class SegmentSharing(PoolExtension):
    """Segments, and the prefix tree of other requests; see :class:`shared.cache.pool.extension.PoolExtension`."""

    def __init__(self, registry: SegmentRegistry, sharing: PrefixSharing, is_sharing: bool) -> None:
        self.registry, self.sharing, self.is_sharing = registry, sharing, is_sharing
        self.users: dict[Request, int] = {}  # for admitted requests made of segments: the number of segment tokens
        self.known: Any = None  # what the ranges were built from
        self.ranges: tuple[Range, ...] = ()

    def _has_prefix(self, request: Request) -> bool:
        """Whether the request uses the prefix tree."""
        registry = self.registry
        return self.is_sharing and request not in registry.computing and request not in registry.contexts

    def admit(self, pool: BlockTables, request: Request) -> int:
        """A request made of segments becomes their user, and reserves no blocks for them."""
        if self._has_prefix(request):
            return self.sharing.admit(pool, request)
        segments = self.registry.contexts.get(request, ())
        if segments:
            self.registry.acquire(segments)
            self.users[request] = pool.num_slotless[request] = self.registry.context_length(request)
        return self.users.get(request, 0)

    def must_wait(self, request: Request) -> bool:
        """A request waits for the segments that it is made of."""
        return self.sharing.must_wait(request) if self._has_prefix(request) else bool(self.registry.missing(request))

    def allocate(self, pool: BlockTables, count: int) -> Blocks | None:
        """Evicts segments if the tree cannot free enough."""
        missing = count - pool.allocator.num_free - self.sharing.num_unused_blocks()
        if 0 < missing <= len(self.registry.unused_blocks()):
            self.registry.evict(missing)
        return self.sharing.allocate(pool, count)

    def commit(self, pool: BlockTables, request: Request, num_tokens: int) -> None:
        """The registry also holds the blocks of a complete segment."""
        self.sharing.commit(pool, request, num_tokens)
        segment, row = self.registry.computing.get(request), pool.rows[request]
        if segment is not None and pool.lengths[row] == len(segment):
            blocks = pool.tables[row, : pool.num_held[row]].copy()
            pool.allocator.share(blocks)
            self.registry.store(segment, blocks)

    def check_truncation(self, request: Request, num_tokens: int) -> None:
        self.sharing.check_truncation(request, num_tokens)

    def release(self, request: Request) -> None:
        """The segments stay."""
        if request in self.users:
            del self.users[request]
            self.registry.release(self.registry.contexts[request])
        self.sharing.release(request)

    def context_length(self, request: Request) -> int:
        return self.users.get(request, 0)

    def lay_out(self, pool: BlockTables, schedule: Schedule, layout: PagedLayout) -> PagedLayout:
        layout = self.sharing.lay_out(pool, schedule, layout)
        if not self.users:
            return layout
        contexts: tuple[tuple[Segment, ...], ...] = tuple(
            [self.registry.contexts.get(request, ()) for request in schedule.requests]
        )
        if not any(contexts):
            return layout
        known = contexts, self.registry.num_evictions
        if known != self.known:  # equal ranges are the same object, so that views need not plan again
            self.known, self.ranges = known, ranges_of(contexts)
        return replace(layout, extra=LayoutRanges(self.ranges))

    def num_unused_blocks(self) -> int:
        """Includes segments that no request uses."""
        return self.sharing.num_unused_blocks() + len(self.registry.unused_blocks())

    def used_tokens(self) -> int:
        """A segment counts once."""
        return self.sharing.used_tokens() + self.registry.used_tokens()

    def unused_blocks(self) -> list[int]:
        return [*self.sharing.unused_blocks(), *self.registry.unused_blocks().tolist()]

    def drop_unused(self, pool: BlockTables) -> None:
        """The segments stay registered."""
        self.sharing.drop_unused(pool)
        self.registry.evict(pool.allocator.num_blocks)

    def audit(self, pool: BlockTables) -> list[str]:
        """Those of the tree and the registry."""
        return self.sharing.audit(pool) + self.registry.audit(self.users)

    def block_lists(self) -> list[Blocks]:
        return [*self.sharing.block_lists(), self.registry.blocks()]
