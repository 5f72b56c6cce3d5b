"""What all heads of cached sequences will keep, chosen on a GPU without waiting for it. Introduced in phase 9.2.

:func:`shared.compression.selection.select` is the definition, for one head. Here all layers and heads of several
sequences are chosen by a handful of launches. Only the heads' counts come to the host, for the pool's accounts, and
they come by themselves. The launches have a stream of their own: choosing computes, and the step beside it waits for
memory.

Invariant: nothing is written to the KV cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from shared.kernels.window_mass import TABLE_START, CachedSequences, window_mass


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on their way to the device."""
    array = torch.from_numpy(numbers)
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched inside runs behind what was launched before, and beside what is launched later."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


@dataclass(frozen=True)
class CachedKeys:
    """The measures of the sequences' keys; see :class:`shared.compression.compressors.KeyMeasures`.

    Args:
        ring, keys, scale: as for :func:`shared.kernels.window_mass.window_mass`.
        num_queries: of the window.
    """

    ring: Tensor
    keys: Tensor
    sequences: CachedSequences
    num_queries: int
    scale: float

    @staticmethod
    def located(sequences: Sequence[Holding], ends: Tensor) -> CachedSequences:
        """Where the tokens of sequences are, for kernels; ``ends`` as in ``KeptTokens``."""
        width = TABLE_START + max(len(one.table) for one in sequences)
        numbers = np.zeros((len(sequences), -(-width // 4) * 4), np.int32)  # rows are aligned
        for row, one in zip(numbers, sequences, strict=True):
            row[:TABLE_START] = one.row, one.num_tokens, one.num_tail, one.num_packed_slots
            row[TABLE_START : TABLE_START + len(one.table)] = one.table
        return CachedSequences(sent(numbers, ends.device), ends, max(map(longest, sequences)))

    def mass(self, num_queries: int) -> Tensor:
        """See ``KeyMeasures``."""
        return window_mass(self.ring, self.keys, self.sequences, min(num_queries, self.num_queries), self.scale)

    def redundancy(self, threshold: float) -> Tensor:
        """See ``KeyMeasures``."""
        return key_redundancy(self.keys, self.sequences, threshold)


def longest(sequence: Holding) -> int:
    """The most tokens that a head of a sequence has."""
    return sequence.num_tail + (0 if sequence.packed is None else int(sequence.packed.counts.max()))


class Selected:
    """What the heads of sequences will keep.

    Args:
        windows, p: as for :func:`shared.kernels.key_selection.select_keys`.
    """

    def __init__(
        self,
        holdings: Sequence[Holding],
        keys: CachedKeys,
        compressor: BatchedCompressor,
        windows: Tensor,
        budget: Budget,
        p: Tensor,
    ) -> None:
        self.holdings, self.sequences = holdings, keys.sequences
        mass = keys.mass(keys.num_queries)
        attention = mass.mean(-2)
        attention /= attention.sum(-1, keepdim=True)
        scores = compressor.of_all(keys, mass)
        self.chosen, self.counts = select_keys(scores, attention, self.sequences, windows, budget, p)
        self._copied = self.counts.to("cpu", non_blocking=True)  # pinned memory; not valid before the event
        self._arrived = torch.cuda.Event() if self.counts.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def index(self, holding: Holding) -> int | None:
        """Which of the sequences has the tokens of ``holding``, wherever they are by now; None if none has."""
        for i, one in enumerate(self.holdings):
            if one.row == holding.row and one.packed is holding.packed and one.length == holding.length:
                return i
        return None

    def precede(self) -> None:
        """Let what is launched from now on run behind this choice."""
        if self._arrived is not None:
            torch.cuda.current_stream(self.counts.device).wait_event(self._arrived)

    def wait(self) -> Integers:
        """Wait for the device and return how many tokens each head keeps, [n, layers, Hkv]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copied.numpy().astype(np.int64)
