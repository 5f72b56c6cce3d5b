"""The device side of a KV cache: the interface of a view. Introduced in phase 4.

A view allocates the whole KV cache once and loads a batch before each forward. Invariants: a batch contains everything
that a view needs to know about a step; a step writes only after the committed tokens, so a failed step can be run
again; the loaded arrays have fixed addresses.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM
from shared.models.tokens import KVView, Tokens


class StepInputs(NamedTuple):
    """The arrays of a batch on the device."""

    tokens: Tokens  # the id of a pending token is -1 - r: the last id sampled for the sequence in row r of the pool
    logit_rows: Tensor  # int64 [n]; in a bucket of phase 9 that is no decode step, followed by zeros: [T]
    sequence_rows: Tensor  # int64 [n], the pool's row of the sequence of each logit row

    @classmethod
    def of(cls, sent: Mapping[str, Tensor]) -> Self:
        """From the uploaded arrays of ``step_arrays``."""
        return cls(
            Tokens(sent["token_ids"], sent["positions"], sent.get("gate")), sent["logit_rows"], sent["sequence_rows"]
        )


class BatchView(KVView, Protocol):
    """The model's view of the KV cache during a step of many sequences."""

    num_bytes: int  # of the keys and values

    def load(self, batch: Batch) -> StepInputs:
        """Upload a batch in one copy."""
        ...


def step_ranges(max_tokens: int) -> dict[str, tuple[int, DTypeLike]]:
    """Staging ranges for the arrays that every view uploads, for batches of up to ``max_tokens`` tokens."""
    return dict.fromkeys(("logit_rows", "sequence_rows", "token_ids", "positions"), (max_tokens, np.int64))


def step_arrays(batch: Batch) -> dict[str, NDArray[np.int64]]:
    """The arrays of ``step_ranges``."""
    token_ids, sequence_rows = batch.token_ids, batch.layout.rows[batch.logit_sequences]
    if len(batch.pending) == len(token_ids) == len(batch):
        token_ids = -1 - batch.layout.rows
    elif len(batch.pending):
        token_ids = token_ids.copy()
        token_ids[batch.pending] = -1 - batch.layout.rows[batch.pending_sequences]
    return {
        "logit_rows": batch.logit_rows,
        "sequence_rows": sequence_rows,
        "token_ids": token_ids,
        "positions": batch.positions,
    }


MakeMemory = Callable[[EngineConfig, CausalLM, int], tuple[CachePoolProtocol, BatchView]]
"""Makes pool and view from an engine's settings, its model, and the maximum tokens of a sequence.

Raises ConfigError if they do not fit in memory.
"""
