"""The draw that accepts or replaces drafts by rejection sampling. Introduced in phase 11.

The plain draw samples the target's token in every row, and the scheduler keeps the drafts that match it. This draw
samples only where a draft is missing or rejected (:mod:`shared.sampling.rejection`): outputs have the same distribution
as without drafts, but may differ for the same seed. Greedy rows have one possible token, so they are sampled as before.

Invariant: acceptance uses the edited distribution, so a draft that a step masks has probability 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shared.engine.executor.staging import upload
from shared.engine.sampling.drawing import Draw, Edited, plain
from shared.sampling.rejection import accept_or_replace
from shared.sampling.sampler import SamplingRow


def acceptance(method: str, distributions: Mapping[tuple[int, int], torch.Tensor]) -> Draw:
    """The draw of ``EngineConfig.acceptance_method``."""
    return Rejection(distributions) if method == "rejection" else plain


@dataclass(frozen=True)
class Rejection:
    """A :data:`shared.engine.sampling.drawing.Draw` that accepts drafts by rejection sampling.

    Attributes:
        distributions: the probabilities ``[V]`` from which each draft was sampled, by its request's serial and its
            index; a missing key means that q is one-hot. A draft model may have fewer columns.
    """

    distributions: Mapping[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __call__(self, edited: Edited, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See :data:`shared.engine.sampling.drawing.Draw`."""
        ids = edited.sample()
        drafts = {
            number: row.draft_id
            for number, row in enumerate(rows)
            if row.draft_id is not None and not row.params.is_greedy
        }
        if not drafts:
            return ids
        logits = edited.logits
        numbers, draft_ids = upload(torch.tensor([list(drafts), list(drafts.values())]), logits.device).unbind()
        keys = [(rows[number].serial, rows[number].index) for number in drafts]
        q = logits.new_zeros(len(drafts), logits.shape[1], dtype=torch.float32).scatter_(1, draft_ids[:, None], 1.0)
        drawn = {n: self.distributions[key] for n, key in enumerate(keys) if key in self.distributions}
        if drawn:
            probabilities = torch.stack(list(drawn.values()))
            q[upload(torch.tensor(list(drawn)), logits.device), : probabilities.shape[1]] = probabilities
        return accept_or_replace(ids, logits, edited.batch, numbers, draft_ids, q)
