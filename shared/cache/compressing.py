"""Compression of a request's KV cache: what its two sides must offer, and in which order. Introduced in phase 9.2.

The view alone sees keys and queries, so it decides what is kept and moves it; then the pool counts it and frees blocks.
Invariant: no step is in flight that reads or writes the request.
"""

from typing import Protocol, cast

from shared.cache.condensed_layout import Holding, Packed
from shared.cache.pool import CachePoolProtocol
from shared.cache.view import BatchView
from shared.engine.request import Request


class CompressingPool(CachePoolProtocol, Protocol):
    """A pool whose requests may hold fewer slots than they have tokens."""

    def holding(self, request: Request) -> Holding:
        """The committed tokens of a request."""
        ...

    def compress(self, request: Request, packed: Packed) -> int:
        """Count what is kept of a request; returns the number of blocks that this frees."""
        ...


class CompressingView(BatchView, Protocol):
    """A view that keeps a part of a sequence."""

    def compress(self, sequence: Holding) -> Packed | None:
        """Keep the best tokens of a sequence; None, and no change, if less than a block would go."""
        ...


def compress(pool: CachePoolProtocol, view: BatchView, request: Request) -> tuple[Packed | None, int]:
    """Compress a request in a memory that can; returns what it keeps, None if nothing was dropped, and the number of
    blocks that were freed.
    """
    packed = cast(CompressingView, view).compress(cast(CompressingPool, pool).holding(request))
    return packed, 0 if packed is None else cast(CompressingPool, pool).compress(request, packed)
