"""Compression of a request's KV cache: what its two sides must offer, and in which order. Introduced in phase 9.2.

The view alone sees keys and queries, so it decides what is kept. Then the pool counts it, gives it blocks and frees the
others, and the view moves it. Invariant: no step is in flight that reads or writes the request.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from shared.cache.blocks import Blocks
from shared.cache.condensed_layout import Holding, Packed
from shared.cache.pool import CachePoolProtocol
from shared.cache.view import BatchView
from shared.engine.request import Request

Place = Callable[[Packed], Blocks | None]
"""The block table for what is kept; None if there is no room."""


class CompressingPool(CachePoolProtocol, Protocol):
    """A pool whose requests may hold fewer slots than they have tokens."""

    def holding(self, request: Request, num_in_flight: int = 0) -> Holding:
        """The committed tokens of a request, and those of the step in flight."""
        ...

    def compress(self, request: Request, packed: Packed) -> int | None:
        """Count what is kept of a request; returns the number of blocks that this frees, None if it has no room."""
        ...


class CompressingView(BatchView, Protocol):
    """A view that keeps a part of a sequence."""

    def select(self, sequences: Sequence[Holding]) -> None:
        """Begin to choose what :meth:`compress` will keep of sequences whose last tokens are in flight, if that can go
        on while other sequences' steps are launched.
        """
        ...

    def compress(self, sequence: Holding, place: Place) -> Packed | None:
        """Keep the best tokens of a sequence in the blocks of ``place``, to which nothing may be written before they
        are moved; None, and no change, if less than a block would go, or there is no room.
        """
        ...


def compress(
    pool: CachePoolProtocol, view: BatchView, request: Request, make_room: Callable[[Request], bool]
) -> tuple[tuple[tuple[int, ...], ...] | None, int]:
    """Compress a request in a memory that can; returns how many tokens each KV head of each layer keeps, None for all,
    and the number of freed blocks.

    Args:
        make_room: frees memory for a request; False if it cannot.
    """
    own, num_freed = cast(CompressingPool, pool), 0

    def place(packed: Packed) -> Blocks | None:
        nonlocal num_freed
        while (freed := own.compress(request, packed)) is None:
            if not make_room(request):
                return None
        num_freed = freed
        return own.holding(request).table

    packed = cast(CompressingView, view).compress(own.holding(request), place)
    return None if packed is None else tuple(map(tuple, packed.counts.tolist())), num_freed


def select(pool: CachePoolProtocol, view: BatchView, requests: Sequence[Request]) -> None:
    """Begin the compressions of requests that reach their lengths in the step in flight."""
    own = cast(CompressingPool, pool)
    holdings = [own.holding(one, one.num_scheduled_tokens - one.num_computed_tokens) for one in requests]
    if holdings:
        cast(CompressingView, view).select(holdings)
