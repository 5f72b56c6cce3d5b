"""The KV cache of many requests, as the model sees it: the device's side. Introduced in phase 4.

A view is made once, with memory for all that will ever be stored, and loads a batch before each forward. Invariants: a
batch says everything that a view has to know of a step; what a step writes stands behind the tokens that were
committed, so a step that fails can be run again; what is loaded stands at addresses that never move.
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
    """The memory as the model sees it during a step of many sequences."""

    num_bytes: int  # of keys and values

    def load(self, batch: Batch) -> tuple[Tokens, torch.Tensor]:
        """Bring a batch to the device in one copy; the model's tokens, and int64 ``[n]``, its logit rows."""
        ...


def step_places(max_tokens: int) -> dict[str, tuple[int, DTypeLike]]:
    """Places in a staging for the arrays that any view needs of a batch of up to so many tokens."""
    return dict.fromkeys(("logit_rows", "token_ids", "positions"), (max_tokens, np.int64))


def step_arrays(batch: Batch) -> dict[str, NDArray[np.int64]]:
    """Those arrays."""
    return {"logit_rows": batch.logit_rows, "token_ids": batch.token_ids, "positions": batch.positions}


MakeMemory = Callable[[EngineConfig, CausalLM, int], tuple[CachePoolProtocol, BatchView]]
"""Makes both sides for an engine's settings, its model, and the most tokens that a sequence may have.

Raises ConfigError where there is no room for them.
"""
