"""What all heads of a cached sequence will keep, chosen on a GPU without waiting for it. Introduced in phase 9.2.

:func:`shared.compression.selection.select` is the definition, for one head. Here all layers and heads are chosen by a
handful of launches. Only the heads' counts come to the host, for the pool's accounts, and they come by themselves.

Invariant: nothing is written to the KV cache.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.cache.condensed_layout import Holding
from shared.cache.layout import Integers
from shared.compression.compressors import BatchedCompressor
from shared.compression.selection import Budget
from shared.kernels.key_redundancy import key_redundancy
from shared.kernels.key_selection import select_keys
from shared.kernels.window_mass import TABLE_START, CachedSequence, window_mass


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on their way to the device."""
    array = torch.from_numpy(numbers)
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array


@dataclass(frozen=True)
class CachedKeys:
    """The measures of a sequence's keys; see :class:`shared.compression.compressors.KeyMeasures`.

    Args:
        ring, keys, scale: as for :func:`shared.kernels.window_mass.window_mass`.
        num_queries: of the window.
    """

    ring: Tensor
    keys: Tensor
    sequence: CachedSequence
    num_queries: int
    scale: float

    @staticmethod
    def located(sequence: Holding, ends: Tensor) -> CachedSequence:
        """Where the tokens of a sequence are, for kernels; ``ends`` as in ``KeptTokens``."""
        numbers = np.zeros(TABLE_START + len(sequence.table), np.int32)
        numbers[:4] = sequence.row, sequence.num_tokens, sequence.num_tail, sequence.num_packed_slots
        numbers[TABLE_START:] = sequence.table
        longest = sequence.num_tail + (0 if sequence.packed is None else int(sequence.packed.counts.max()))
        return CachedSequence(sent(numbers, ends.device), ends, longest)

    def mass(self, num_queries: int) -> Tensor:
        """See ``KeyMeasures``."""
        return window_mass(self.ring, self.keys, self.sequence, min(num_queries, self.num_queries), self.scale)

    def redundancy(self, threshold: float) -> Tensor:
        """See ``KeyMeasures``."""
        return key_redundancy(self.keys, self.sequence, threshold)


class Selected:
    """What the heads of a sequence will keep.

    Args:
        windows, p: as for :func:`shared.kernels.key_selection.select_keys`.
    """

    def __init__(
        self,
        holding: Holding,
        keys: CachedKeys,
        compressor: BatchedCompressor,
        windows: Tensor,
        budget: Budget,
        p: Tensor,
    ) -> None:
        self.holding, self.sequence = holding, keys.sequence
        mass = keys.mass(keys.num_queries)
        attention = mass.mean(-2)
        attention /= attention.sum(-1, keepdim=True)
        scores = compressor.of_all(keys, mass)
        self.chosen, self.counts = select_keys(scores, attention, self.sequence, windows, budget, p)
        self._copied = self.counts.to("cpu", non_blocking=True)  # pinned memory; not valid before the event
        self._arrived = torch.cuda.Event() if self.counts.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def is_of(self, holding: Holding) -> bool:
        """Whether this is a choice among the tokens of ``holding``, wherever they are by now."""
        return self.holding.packed is holding.packed and self.holding.length == holding.length

    def wait(self) -> Integers:
        """Wait for the device and return how many tokens each head keeps, [layers, Hkv]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copied.numpy().astype(np.int64)
