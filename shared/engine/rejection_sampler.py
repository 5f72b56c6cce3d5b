"""A sampler that accepts or replaces drafts by rejection sampling. Introduced in phase 11.

The other samplers draw the target's token in every row, and the scheduler keeps the drafts that equal it. This one
draws only where no draft is left (:mod:`shared.sampling.rejection`): the answers are distributed as without drafts, but
with the same seed they may be others. Greedy rows have one possible token, so they are sampled as ever.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from shared.engine.sampler import Sampler
from shared.sampling.rejection import accept_or_replace
from shared.sampling.sampler import SamplingBatch, SamplingRow


class RejectionSampler(Sampler):
    """As :class:`Sampler`, with drafts accepted by chance.

    Args:
        sampler: the arguments of :class:`Sampler`.
        distributions: the probabilities ``[V]`` from which each draft was drawn, by its request's serial and its
            index; those that are missing were certain. A draft model may have fewer columns.
    """

    def __init__(
        self, *sampler: Any, distributions: Mapping[tuple[int, int], torch.Tensor] = MappingProxyType({})
    ) -> None:
        super().__init__(*sampler)
        self.distributions = distributions

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], places: Sequence[int], batch: SamplingBatch
    ) -> torch.Tensor:
        ids = super()._draw(logits, rows, places, batch)
        drafts = {
            number: row.draft_id
            for number, row in enumerate(rows)
            if row.draft_id is not None and not row.params.is_greedy
        }
        if not drafts:
            return ids
        numbers, draft_ids = self.upload(torch.tensor([list(drafts), list(drafts.values())])).unbind()
        keys = [(rows[number].serial, rows[number].index) for number in drafts]
        q = logits.new_zeros(len(drafts), logits.shape[1], dtype=torch.float32).scatter_(1, draft_ids[:, None], 1.0)
        drawn = {n: self.distributions[key] for n, key in enumerate(keys) if key in self.distributions}
        if drawn:
            probabilities = torch.stack(list(drawn.values()))
            q[self.upload(torch.tensor(list(drawn))), : probabilities.shape[1]] = probabilities
        return accept_or_replace(ids, logits, batch, numbers, draft_ids, q)
