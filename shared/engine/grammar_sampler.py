"""Samplers for rows that have a grammar: the mask comes first, then what the other samplers do. Introduced in phase 12.

Log-probabilities stay those of the raw logits.
"""

from collections.abc import Sequence

import torch

from shared.engine.rejection_sampler import RejectionSampler
from shared.engine.sampler import Sampler
from shared.sampling.logit_mask import LogitMaskProcessor
from shared.sampling.sampler import SamplingBatch, SamplingRow


class GrammarSampler(Sampler):
    """As :class:`Sampler`, of the tokens that each row's grammar allows."""

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow], batch: SamplingBatch) -> torch.Tensor:
        processor = LogitMaskProcessor.of([row.allowed for row in rows])
        if processor is not None:
            logits = processor.sent(self.upload)(logits)
        return super()._draw(logits, rows, batch)


class GrammarRejectionSampler(GrammarSampler, RejectionSampler):
    """As :class:`RejectionSampler`: a draft that the grammar does not allow has the probability 0."""
