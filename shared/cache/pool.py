"""The memory that many requests share, as engine and scheduler see it. Introduced in phase 4.

Two sides. On the host a pool says who may have how much: a scheduler reserves before it admits, counts what a step has
written, and releases. On the device a view stands behind the model; it is made once and told before each step what the
step brings. Engine and scheduler know these protocols and nothing of what is behind them, regions or blocks.

Invariants of every pool: a request that was granted n tokens can be given n tokens, whatever others do; what is held is
held by a request that has not been released, and ``audit`` says so; nothing here looks at a tensor's values.
"""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM
from shared.models.tokens import KVView, Tokens


class BatchView(KVView, Protocol):
    """The memory as the model sees it during a step of many sequences."""

    def prepare(self, batch: Batch) -> tuple[Tokens, torch.Tensor]:
        """Bring a step's plan to the device in one copy; the model's tokens, and int64 ``[n]``, its logit rows."""
        ...


class CachePoolProtocol(Protocol):
    """Keys and values of many requests. ``num_tokens`` counts a request's tokens in all, from its first."""

    request_capacity: int  # the most tokens that one request can have, were it alone
    capacity_tokens: int
    used_tokens: int  # written; what is neither used nor free is reserved and empty, or can be granted to nobody
    num_bytes: int
    watermark_tokens: int  # free tokens that admission leaves to those that run; 0 where nobody who runs needs more

    @classmethod
    def for_engine(cls, config: EngineConfig, model: CausalLM, max_seq_len: int) -> Self:
        """The pool that an engine with these settings needs; raises ConfigError where there is no room for it."""
        ...

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Grant a request so many tokens in all, if there is room; False, with nothing changed, if there is not.

        Raises CapacityError for more than ``request_capacity``, which no waiting would bring.
        """
        ...

    def advance(self, request_id: str, num_tokens: int) -> None:
        """Count tokens that a step has written; raises CapacityError for more than were granted."""
        ...

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Forget all but a request's first tokens, and keep the grant; raises CapacityError if there are fewer."""
        ...

    def release(self, request_id: str) -> None:
        """Take back what a request holds, which may be nothing."""
        ...

    def length(self, request_id: str) -> int:
        """Tokens that are written for a request; 0 for one that holds nothing."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens that can still be granted."""
        ...

    def holdings(self) -> tuple[int, dict[str, list[int]]]:
        """Tokens of a block, and of each holder the numbers of its blocks in the order of its tokens.

        The unit that is granted is called a block here; a region is one large one.
        """
        ...

    def audit(self) -> Sequence[str]:
        """What is held and what is wrong, a sentence each; empty for a pool in order that nobody uses."""
        ...

    def view(self, num_heads: int, backend: str | None = None) -> BatchView:
        """What the model sees, to be made once.

        Args:
            num_heads: the model's query heads, Hq.
            backend: a value of ``EngineConfig.attention_backend`` that the pool has; None: the last of them.
        """
        ...
