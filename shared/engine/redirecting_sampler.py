"""Samplers for rows whose tokens are redirected: the redirection comes first. Introduced in phase 11.1.

Log-probabilities stay those of the raw logits.
"""

from collections.abc import Sequence

import torch

from shared.engine.rejection_sampler import RejectionSampler
from shared.engine.sampler import Sampler
from shared.sampling.redirect import RedirectProcessor
from shared.sampling.sampler import SamplingBatch, SamplingRow


class RedirectingSampler(Sampler):
    """As :class:`Sampler`, with ``SamplingRow.redirect``."""

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], places: Sequence[int], batch: SamplingBatch
    ) -> torch.Tensor:
        processor = RedirectProcessor.of(rows)
        if processor is not None:
            logits = processor.sent(self.upload)(logits)
        return super()._draw(logits, rows, places, batch)


class RedirectingRejectionSampler(RedirectingSampler, RejectionSampler):
    """As :class:`RejectionSampler`: a draft is accepted by the redirected distribution."""
