"""The new tokens of one step, as the model sees them. Introduced in phase 1a.

A step is a ragged batch: the new tokens of all its sequences laid end to end, without padding. Invariant: the model
learns nothing else about the step; which token belongs to which sequence is known to the KV view alone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Tokens:
    """T new tokens.

    ``positions`` are logical (they turn RoPE and may repeat or have gaps); the order in the cache is the view's affair.
    ``gate`` is 1 where gated-LoRA projections act; no other layer reads it.
    """

    ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    gate: torch.Tensor | None = None  # [T]


class QueryKeyTransform(Protocol):
    """What a layer does to queries and keys before they meet: norm, rotation."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class KVView(Protocol):
    """The memory behind the model: a layer writes its keys and values, then attends over what each token may see.

    The model does not know what stands behind: nothing, one cache, regions, blocks, or fixed buffers of a CUDA graph.
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
        """Apply ``qk``, keep k and v ``[T, Hkv, D]``, return the queries ``[T, Hq, D]`` ready for :meth:`attend`."""
        ...

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention of the new tokens over their own sequences: ``[T, Hq, D]``."""
        ...
