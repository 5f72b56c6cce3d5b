"""The KV cache of many requests, as engine and scheduler see it: the host's side. Introduced in phase 4.

Two sides, in modules of their own. On the host a pool keeps account: a scheduler reserves before it admits, commits
what a step has written, and releases. On the device a view holds the tensors and stands behind the model
(:mod:`shared.cache.view`). What passes between them is a :class:`~shared.cache.layout.Layout`, plain numbers. Engine
and scheduler know these protocols and nothing of what is behind them.

Invariants of every pool: a request that was granted n tokens can be given n tokens, whatever others do; what is held is
held by a request that has not been released, and ``audit`` says so; a pool holds no tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shared.cache.layout import Layout
from shared.engine.request import Request
from shared.scheduling.schedule import Schedule


class CachePoolProtocol(Protocol):
    """Accounts of the keys and values of many requests. ``num_tokens`` counts a request's tokens from its first."""

    max_sequences: int  # the most requests that can hold memory at a time
    request_capacity: int  # the most tokens that one request can have, were it alone
    capacity_tokens: int
    used_tokens: int  # written; what is neither used nor free is reserved and empty, or too small to be granted
    watermark_tokens: int  # free tokens that admission leaves to running requests; 0 where their grants never grow

    def admit(self, request: Request) -> int:
        """Begin to hold a request; returns how many of its first tokens the pool has already: 0 without a prefix tree.

        A request that is not granted memory afterwards has to be released.
        """
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Grant a request so many tokens in all, if there is room; False, with nothing changed, if there is not.

        Raises CapacityError for more than ``request_capacity``, which no waiting would bring.
        """
        ...

    def commit(self, request: Request, num_tokens: int) -> None:
        """Count tokens that a step has written; raises CapacityError for more than were granted."""
        ...

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Forget all but a request's first tokens, and keep the grant; raises CapacityError if there are fewer."""
        ...

    def release(self, request: Request) -> None:
        """Take back what a request holds, which may be nothing."""
        ...

    def length(self, request: Request) -> int:
        """Tokens that are written for a request; 0 for one that holds nothing."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens that can still be granted."""
        ...

    def layout(self, schedule: Schedule) -> Layout:
        """Where the schedule's tokens go and what they attend over; counts nothing, so it can be asked again.

        Raises CapacityError for tokens that were not granted.
        """
        ...

    def holdings(self) -> tuple[int, Mapping[Request, Sequence[int]]]:
        """Tokens of a block, and of each holder the numbers of its blocks in the order of its tokens.

        The unit that is granted is called a block here; a region is one large one.
        """
        ...

    def audit(self) -> Sequence[str]:
        """What is held and what is wrong, a sentence each; empty for a pool in order that holds no request."""
        ...
