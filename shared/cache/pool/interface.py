"""The host side of a KV cache: the interface of a pool. Introduced in phase 4.

A KV cache has two sides in separate modules. On the host, a pool manages space: the scheduler reserves slots before it
admits a request, commits the tokens that a step has written, and releases the slots. On the device a view holds the
tensors (:mod:`shared.cache.view.interface`). The pool passes a :class:`~shared.cache.layout.slots.Layout`, plain
arrays, to the view. Engine and scheduler depend on these protocols only.

Invariants of every pool: reserved tokens can be written, whatever other requests do; only requests that have not been
released hold space, and ``audit`` lists them; a pool holds no tensor.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from shared.cache.layout.slots import Layout
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule


class CachePoolProtocol(Protocol):
    """Manages the KV cache space of many requests. ``num_tokens`` counts a request's tokens from its first."""

    max_sequences: int  # maximum number of requests that hold space at the same time
    request_capacity: int  # maximum tokens of a request that is alone in the pool
    capacity_tokens: int
    watermark_tokens: int  # free tokens that admission leaves to running requests; 0 if reservations never grow

    def admit(self, request: Request) -> int:
        """Register a request; returns how many of its first tokens are already cached: 0 without a prefix tree.

        A request whose ``reserve`` fails afterwards must be released.
        """
        ...

    def must_wait(self, request: Request) -> bool:
        """Whether a running request is computing blocks that a waiting one could share; False without a prefix tree."""
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve space for ``num_tokens`` tokens of a request in total; False, and no change, if there is not enough
        space.

        Raises CapacityError for more than ``request_capacity``, which can never be reserved.
        """
        ...

    def commit(self, request: Request, num_tokens: int) -> None:
        """Count the tokens that a step has written; raises CapacityError for more than were reserved."""
        ...

    def reserve_next(self, requests: Iterable[Request]) -> list[Request]:
        """Reserve the next token of each decoding request in the simple cases; returns the remaining requests."""
        ...

    def commit_next(self, requests: Iterable[Request]) -> None:
        """``commit`` one token of each request."""
        ...

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Drop all but a request's first tokens, and keep the reservation; raises CapacityError if there are fewer."""
        ...

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Release what is reserved beyond a request's first ``num_tokens`` tokens and has not been written."""
        ...

    def release(self, request: Request) -> None:
        """Free all space that a request holds; a request that holds none is ignored."""
        ...

    def length(self, request: Request) -> int:
        """Tokens in the cache for a request; 0 if it holds no space."""
        ...

    @property
    def used_tokens(self) -> int:
        """Tokens written; slots that are neither used nor free are reserved, or unused in partially filled blocks."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens that can still be reserved."""
        ...

    def layout(self, schedule: Schedule) -> Layout:
        """The slots that the schedule's tokens write and read; changes no state, so it can be called repeatedly.

        Raises CapacityError for tokens that were not reserved.
        """
        ...

    def holdings(self) -> tuple[int, Mapping[Request, Sequence[int]]]:
        """The block size in tokens, and the block table of each request. A contiguous region counts as one block."""
        ...

    def cached_blocks(self) -> Sequence[int]:
        """The blocks that no request holds and that are kept for requests with the same prefix (phase 8)."""
        ...

    def drop_cached(self) -> None:
        """Free those blocks, so that later requests find nothing in the cache."""
        ...

    def audit(self) -> Sequence[str]:
        """One message per request that holds space, and one per violated invariant; empty for a consistent, empty
        pool."""
        ...
