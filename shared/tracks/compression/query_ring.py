"""The last queries of each sequence, which determine which of its keys matter. Introduced in phase 9.2.

Invariant: a token's query has a fixed slot in the ring, so a step can safely be run again.
"""

import numpy as np
import torch
from torch import Tensor

from shared.cache.layout.slots import Integers
from shared.engine.batch import Batch
from shared.models.config import ModelConfig


class QueryRing:
    """``queries``, ``[L, max_sequences + 1, length, Hq, D]``: token t uses slot ``t % length`` of its sequence's row.

    The last row is for discarded queries: padding, and tokens before the last ``length`` of a sequence.
    """

    def __init__(
        self, config: ModelConfig, max_sequences: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, max_sequences + 1, length, config.num_heads, config.head_dim)
        self.queries = torch.zeros(shape, dtype=dtype, device=device)
        self.length, self.not_kept = length, max_sequences * length

    def slots(self, batch: Batch) -> Integers:
        """The index of each new token's query in a layer, ``[T]``."""
        num_new = batch.num_new_tokens
        slots = batch.layout.rows.repeat(num_new) * self.length + batch.positions % self.length
        if batch.is_decode:
            return slots
        num_after = num_new.cumsum().repeat(num_new) - np.arange(batch.num_tokens)
        return np.where(num_after <= self.length, slots, self.not_kept)

    def keep(self, layer: int, q: Tensor, slots: Tensor) -> None:
        """Store a step's queries ``q [T, Hq, D]``."""
        self.queries[layer].flatten(0, 1).index_copy_(0, slots, q)

    def last(self, layer: int, row: int, num_tokens: int, w: int) -> Tensor:
        """The queries ``[w, Hq, D]`` of a sequence's last w tokens."""
        tokens = torch.arange(num_tokens - w, num_tokens, device=self.queries.device)
        return self.queries[layer, row, tokens % self.length]
