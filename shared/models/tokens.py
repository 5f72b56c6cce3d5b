"""The model's inputs: the new tokens of one step, and the KV view. Introduced in phase 1a.

A step is a ragged batch: the new tokens of all its sequences laid end to end, without padding. Invariant: the model
has no other information about the step; only the KV view knows which token belongs to which sequence.
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch


@dataclass(frozen=True)
class Tokens:
    """T new tokens.

    ``positions`` are logical: they are the RoPE positions, and may repeat or have gaps; the view preserves the order in
    the cache. ``gate`` is 1 for tokens to which gated-LoRA projections apply; no other layer reads it.
    """

    ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    gate: torch.Tensor | None = None  # [T]

    def with_gates_of(self, rows: torch.Tensor | None) -> Self:
        """The tokens with the gates of those in ``rows``, int64 ``[n]``; None: of all. After attention, layers read
        nothing else of them."""
        return self if rows is None or self.gate is None else replace(self, gate=self.gate[rows])


class QueryKeyTransform(Protocol):
    """A layer's transform of queries and keys before attention: norm, rotation."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class KVView(Protocol):
    """The model's interface to the KV cache: a layer writes its keys and values, then attends.

    The model does not know the implementation: no cache, one contiguous cache, regions, blocks, or the fixed buffers of
    a CUDA graph.
    """

    def write(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        qk: QueryKeyTransform,
    ) -> torch.Tensor:
        """Apply ``qk``, store k and v ``[T, Hkv, D]``, return the queries ``[T, Hq, D]`` for :meth:`attend`."""
        ...

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention of the new tokens over their own sequences: ``[T, Hq, D]``."""
        ...
