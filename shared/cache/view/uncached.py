"""A view without a KV cache: attention within the step alone. Introduced in phase 1a.

Every step must contain whole sequences, since no keys and values are kept between steps. Invariant: the view holds the
keys and values of one layer, until the next layer writes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.models.tokens import QueryKeyTransform
from shared.ops.attention import ATTENTION_BACKENDS


class UncachedView:
    """The view of one step of whole sequences, laid end to end.

    Args:
        lengths: tokens of each sequence of the step; the sum is T.
        backend: ``naive`` or ``sdpa``, which is the default.
    """

    def __init__(self, lengths: Sequence[int], backend: str | None = None) -> None:
        self.lengths = list(lengths)
        self.attention = ATTENTION_BACKENDS[backend or "sdpa"]

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        q, k = qk(q, k, positions)
        self.k, self.v = k.transpose(0, 1), v.transpose(0, 1)  # [Hkv, T, D]
        return q

    def attend(
        self, layer: int, q: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        sequences = zip(
            q.split(self.lengths), self.k.split(self.lengths, 1), self.v.split(self.lengths, 1), strict=True
        )
        return torch.cat([self.attention(*qkv, scale=scale, window=window, softcap=softcap) for qkv in sequences])
