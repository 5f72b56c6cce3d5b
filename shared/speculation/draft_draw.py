"""Samples drafts that rejection sampling accepts or replaces. Introduced in phase 11.

Invariant: drafts are sampled with their own noise, independent of the noise that accepts and replaces them.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch

from shared.engine.executor.staging import upload
from shared.engine.sampling.drawing import Edited
from shared.sampling.noise import Stream, gumbel
from shared.sampling.sampler import SamplingRow, adjust_logits, filter_logits


@dataclass(frozen=True)
class DraftDraw:
    """A :data:`shared.engine.sampling.drawing.Draw` from ``Stream.DRAFT``. ``distributions`` receives the probabilities
    ``[V]`` of each sampled draft, by its request's serial and its index.
    """

    distributions: MutableMapping[tuple[int, int], torch.Tensor]

    def __call__(self, edited: Edited, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See :data:`shared.engine.sampling.drawing.Draw`; never replayed, since it stores distributions."""
        batch = edited.batch
        logits = adjust_logits(edited.edit(), batch)
        ids = logits.argmax(-1)
        numbers = [number for number, row in enumerate(rows) if not row.params.is_greedy]
        if not numbers:
            return edited.advance(ids)
        assert batch.seeds is not None
        assert batch.indices is not None
        drawing = upload(torch.tensor(numbers), logits.device)
        q = filter_logits(logits[drawing], batch, drawing).softmax(-1)
        self.distributions.update(zip([(rows[n].serial, rows[n].index) for n in numbers], q, strict=True))
        noise = gumbel(batch.seeds[drawing], batch.indices[drawing], Stream.DRAFT, q.shape[1])
        return edited.advance(ids.index_copy(0, drawing, (q.log() + noise).argmax(-1)))
