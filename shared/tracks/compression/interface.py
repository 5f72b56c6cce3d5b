"""The interface of KV cache compression: what the pool and the view must provide, and in which order. Introduced in
phase 9.2.

Only the view sees keys and queries, so it selects the keys to keep. The pool then counts them, assigns blocks and frees
the rest, and the view moves the keys. Invariant: no step is in flight that reads or writes the request.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from shared.cache.pool.blocks import Blocks
from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.interface import BatchView
from shared.cache.view.paged import PagedView
from shared.engine.request import Request
from shared.tracks.compression.layout import Holding, Packed
from shared.tracks.compression.pool import CompressedRequests

AllocateKept = Callable[[Packed], Blocks | None]
"""Allocates the block table for the kept tokens; None if there is no space."""


class CompressingAttention(Protocol):
    """An attention that keeps part of a sequence."""

    def select(self, sequences: Sequence[Holding]) -> None:
        """Begin choosing what :meth:`compress` will keep of sequences whose last tokens are in flight, if this can run
        alongside later steps of other sequences.
        """
        ...

    def compress(self, sequence: Holding, allocate: AllocateKept) -> Packed | None:
        """Keep the best tokens of a sequence in the blocks of ``allocate``, which must not be written before the tokens
        have moved; None, and no change, if this frees less than a block or there is no space.
        """
        ...


def attention_of(view: BatchView) -> CompressingAttention:
    """The attention of a view that compresses."""
    return cast(CompressingAttention, cast(PagedView, view).attention)


def compress(
    pool: CachePoolProtocol, view: BatchView, request: Request, free_memory: Callable[[Request], bool]
) -> tuple[tuple[tuple[int, ...], ...] | None, int]:
    """Compress a request in a memory that supports it. Returns the number of tokens that each KV head of each layer
    keeps (None: all of them) and the number of freed blocks.

    Args:
        free_memory: frees memory for a request; False if it cannot.
    """
    paged, num_freed = cast(PagedKVCachePool, pool), 0
    own = cast(CompressedRequests, paged.extension)

    def allocate(packed: Packed) -> Blocks | None:
        nonlocal num_freed
        while (freed := own.compress(paged, request, packed)) is None:
            if not free_memory(request):
                return None
        num_freed = freed
        return own.holding(paged, request).table

    packed = attention_of(view).compress(own.holding(paged, request), allocate)
    return None if packed is None else tuple(map(tuple, packed.counts.tolist())), num_freed


def select(pool: CachePoolProtocol, view: BatchView, requests: Sequence[Request]) -> None:
    """Begin the compressions of requests that reach a compression length in the step in flight."""
    paged = cast(PagedKVCachePool, pool)
    own = cast(CompressedRequests, paged.extension)
    holdings = [own.holding(paged, one, one.num_scheduled_tokens - one.num_computed_tokens) for one in requests]
    if holdings:
        attention_of(view).select(holdings)
