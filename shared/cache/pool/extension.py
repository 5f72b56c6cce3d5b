"""The interface for what a paged pool does with blocks other than giving them to requests. Introduced in phase 6.

An extension keeps blocks that outlive their requests, or that hold something other than a request's tokens in order.
A pool has one extension, and calls it when a request is admitted, grows or is released; :class:`NoExtension` does
nothing.

Invariant: an extension holds a reference for each block that it keeps, and lists these in ``block_lists``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from shared.cache.layout.paged import PagedLayout
from shared.cache.pool.blocks import BlockAllocator, Blocks
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule


class BlockTables(Protocol):
    """The part of its pool that an extension reads and writes; see
    :class:`shared.cache.pool.paged.PagedKVCachePool`."""

    block_size: int
    allocator: BlockAllocator
    rows: dict[Request, int]
    free_rows: list[int]
    tables: Blocks
    num_held: list[int]
    granted: list[int]
    lengths: list[int]
    num_slotless: dict[Request, int]
    laid_out: tuple[int, list[int], PagedLayout] | None  # what the next layout continues; None after tokens have moved

    @property
    def free_tokens(self) -> int:
        """See ``CachePoolProtocol``."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that ``num_tokens`` tokens of one request fill."""
        ...


class PoolExtension(Protocol):
    """Called by a pool, which passes its tables as the argument ``pool``; the base class does nothing."""

    prefixes: Mapping[Request, Any] = MappingProxyType({})  # of requests that share one

    def admit(self, pool: BlockTables, request: Request) -> int:
        """See ``CachePoolProtocol``."""
        return 0

    def must_wait(self, request: Request) -> bool:
        """See ``CachePoolProtocol``."""
        return False

    def allocate(self, pool: BlockTables, count: int) -> Blocks | None:
        """``count`` blocks, each with one reference; if necessary, it takes blocks that no request uses. None if there
        are too few."""
        return pool.allocator.allocate(count)

    def commit(self, pool: BlockTables, request: Request, num_tokens: int) -> None:
        """Called after the pool has counted ``num_tokens`` more tokens."""
        return None

    def check_truncation(self, request: Request, num_tokens: int) -> None:
        """Raises CapacityError if the tokens after the first ``num_tokens`` cannot be dropped."""
        return None

    def release(self, request: Request) -> None:
        """Called before the pool frees the blocks of a request, if it holds any."""
        return None

    def context_length(self, request: Request) -> int:
        """How many of an admitted request's tokens are in blocks outside its table."""
        return 0

    def lay_out(self, pool: BlockTables, schedule: Schedule, layout: PagedLayout) -> PagedLayout:
        """The layout of a step, extended with blocks that are not in the tables."""
        return layout

    def num_unused_blocks(self) -> int:
        """Kept blocks that no request uses."""
        return 0

    def used_tokens(self) -> int:
        """Tokens in use that the pool's lengths do not include."""
        return 0

    def unused_blocks(self) -> list[int]:
        """See ``CachePoolProtocol.cached_blocks``."""
        return []

    def drop_unused(self, pool: BlockTables) -> None:
        """See ``CachePoolProtocol.drop_cached``."""
        return None

    def audit(self, pool: BlockTables) -> list[str]:
        """One message per violated invariant."""
        return []

    def block_lists(self) -> list[Blocks]:
        """The kept blocks."""
        return []


class NoExtension(PoolExtension):
    """Every block belongs to one request."""
