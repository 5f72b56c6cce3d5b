"""The device side of a KV cache: the interface of a view. Introduced in phase 4.

A view allocates the whole KV cache once and loads a batch before each forward. Invariants: a batch contains everything
that a view needs to know about a step; a step writes only after the committed tokens, so a failed step can be run
again; the loaded arrays have fixed addresses.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from shared.cache.pool import CachePoolProtocol
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM
from shared.models.tokens import KVView, Tokens


class BatchView(KVView, Protocol):
    """The model's view of the KV cache during a step of many sequences."""

    num_bytes: int  # of keys and values

    def load(self, batch: Batch) -> tuple[Tokens, torch.Tensor]:
        """Upload a batch in one copy; returns the model's tokens and the batch's logit rows, int64 ``[n]``."""
        ...


def step_places(max_tokens: int) -> dict[str, tuple[int, DTypeLike]]:
    """Staging ranges for the arrays that every view uploads, for batches of up to ``max_tokens`` tokens."""
    return dict.fromkeys(("logit_rows", "token_ids", "positions"), (max_tokens, np.int64))


def step_arrays(batch: Batch) -> dict[str, NDArray[np.int64]]:
    """The arrays of ``step_places``."""
    return {"logit_rows": batch.logit_rows, "token_ids": batch.token_ids, "positions": batch.positions}


MakeMemory = Callable[[EngineConfig, CausalLM, int], tuple[CachePoolProtocol, BatchView]]
"""Makes pool and view from an engine's settings, its model, and the maximum tokens of a sequence.

Raises ConfigError if they do not fit in memory.
"""
