"""A sampler that accepts or replaces drafts by rejection sampling. Introduced in phase 11.

The other samplers draw the target's token in every row, and the scheduler keeps the drafts that equal it. This one
draws only where no draft is left (:mod:`shared.sampling.rejection`): the answers are distributed as without drafts, but
with the same seed they may be others. Greedy rows have one possible token, so they are sampled as ever.
"""

from collections.abc import Sequence

import torch

from shared.engine.sampler import Sampler
from shared.sampling.rejection import accept_or_replace
from shared.sampling.sampler import SamplingBatch, SamplingRow


class RejectionSampler(Sampler):
    """As :class:`Sampler`, with drafts accepted by chance."""

    def _draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow], batch: SamplingBatch) -> torch.Tensor:
        ids = super()._draw(logits, rows, batch)
        drafts = {
            number: row.draft_id
            for number, row in enumerate(rows)
            if row.draft_id is not None and not row.params.is_greedy
        }
        if not drafts:
            return ids
        numbers, draft_ids = self.upload(torch.tensor([list(drafts), list(drafts.values())])).unbind()
        return accept_or_replace(ids, logits, batch, numbers, draft_ids)
