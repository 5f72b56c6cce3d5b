"""Rejection sampling of drafts: the target's distribution, with more drafts accepted. Introduced in phase 11.

A draft x is sampled from a distribution q; the target's distribution at its position is p. The draft is accepted with
probability min(1, p(x) / q(x)), and otherwise replaced by a sample from the normalised max(p - q, 0); the result is
distributed as p (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). A draft found by lookup has q(x) =
1, so it is accepted with probability p(x), and the residual is p without x.

A replacement never equals its draft, since the residual is 0 where p < q. So the number of accepted drafts is found by
comparing the tokens with the drafts, as with coupled sampling.

Invariants: drafts, acceptances and residuals use separate noise streams, so they are independent; the noise of rows
after the first rejection has no effect, so it may be reused.
"""

import torch

from shared.sampling.noise import Stream, gumbel, uniform
from shared.sampling.sampler import SamplingBatch, adjust_logits, filter_logits


def accept_or_replace(
    ids: torch.Tensor,
    logits: torch.Tensor,
    batch: SamplingBatch,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    draft_probabilities: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens of all rows, int64 [B]; for sampling rows with a draft, the draft or its replacement.

    Args:
        ids: int64 [B], the tokens of the other rows, as ``sample`` returns them.
        logits: [B, V] in any float dtype; not mutated.
        rows, drafts: int64 [n], the rows with a draft (all of them sample), and their drafts.
        draft_probabilities: float32 [n, V], q of each draft; None: every q is one-hot.
    """
    assert batch.seeds is not None
    assert batch.indices is not None
    p = filter_logits(adjust_logits(logits, batch)[rows], batch, rows).softmax(-1)
    q = torch.zeros_like(p).scatter_(1, drafts[:, None], 1.0) if draft_probabilities is None else draft_probabilities
    seeds, indices = batch.seeds[rows], batch.indices[rows]
    chance = uniform(seeds, indices, Stream.ACCEPT, 1).squeeze(1)
    # exercise 11x4: accept a draft, or draw from what is left
    # hint: a draft is accepted if chance < p / q of its token; without a division, q may be small
    # hint: the residual is p - q where p is larger, and 0 elsewhere; the arg-max of its logarithm plus noise samples
    # hint: the noise is gumbel(...) of Stream.RESIDUAL; index_copy puts the results into the rows of `ids`
    p_draft, q_draft = (probabilities.gather(1, drafts[:, None]).squeeze(1) for probabilities in (p, q))
    residual = (p - q).clamp(min=0)
    # Where rounding leaves no residual, p and q are equal; a draft that rounding rejects is replaced by a sample from
    # p.
    residual = torch.where(residual.amax(-1, keepdim=True) > 0, residual, p)
    replacements = (residual.log() + gumbel(seeds, indices, Stream.RESIDUAL, p.shape[1])).argmax(-1)
    return ids.index_copy(0, rows, torch.where(chance * q_draft < p_draft, drafts, replacements))
    # end exercise
