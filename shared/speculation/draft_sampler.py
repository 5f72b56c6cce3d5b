"""Draws drafts that rejection sampling accepts or replaces. Introduced in phase 11.

Invariant: drafts are drawn with noise of their own, independent of the draws that accept and replace them.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from shared.engine.sampler import Sampler
from shared.sampling.noise import Stream, gumbel
from shared.sampling.sampler import SamplingBatch, SamplingRow, adjust_logits, filter_logits


class DraftSampler(Sampler):
    """As :class:`Sampler`, from ``Stream.DRAFT``; keeps the distribution of each draft that is not greedy.

    Args:
        sampler: the arguments of :class:`Sampler`.
        distributions: gets the probabilities ``[V]`` of each draft, by its request's serial and its index.
    """

    def __init__(self, *sampler: Any, distributions: MutableMapping[tuple[int, int], torch.Tensor]) -> None:
        super().__init__(*sampler)
        self.distributions = distributions

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], places: Sequence[int], batch: SamplingBatch
    ) -> torch.Tensor:
        logits = adjust_logits(logits, batch)
        ids = logits.argmax(-1)
        numbers = [number for number, row in enumerate(rows) if not row.params.is_greedy]
        if not numbers:
            return ids
        assert batch.seeds is not None
        assert batch.indices is not None
        drawing = self.upload(torch.tensor(numbers))
        q = filter_logits(logits[drawing], batch, drawing).softmax(-1)
        self.distributions.update(zip([(rows[n].serial, rows[n].index) for n in numbers], q, strict=True))
        noise = gumbel(batch.seeds[drawing], batch.indices[drawing], Stream.DRAFT, q.shape[1])
        return ids.index_copy(0, drawing, (q.log() + noise).argmax(-1))
