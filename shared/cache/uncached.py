"""A view with no memory behind it: attention within the step alone. Introduced in phase 1a.

The simplest thing that can stand behind the model. Every step must bring whole sequences, since nothing is kept from
one to the next. Invariant: of each layer only its own keys and values of this step are held, until the next layer
writes.
"""

from collections.abc import Sequence

import torch

from shared.models.tokens import QueryKeyTransform
from shared.ops.attention import ATTENTION_BACKENDS


class UncachedView:
    """One step's view over whole sequences, laid end to end.

    Args:
        lengths: tokens of each sequence of the step; they add up to T.
        backend: ``naive`` or ``sdpa``, which is the default.
    """

    def __init__(self, lengths: Sequence[int], backend: str | None = None) -> None:
        self.lengths = list(lengths)
        self.attention = ATTENTION_BACKENDS[backend or "sdpa"]

    def write(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        qk: QueryKeyTransform,
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        q, k = qk(q, k, positions)
        self.k, self.v = k.transpose(0, 1), v.transpose(0, 1)  # [Hkv, T, D]
        return q

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        sequences = zip(
            q.split(self.lengths), self.k.split(self.lengths, 1), self.v.split(self.lengths, 1), strict=True
        )
        return torch.cat([self.attention(*qkv, scale=scale, window=window, softcap=softcap) for qkv in sequences])
