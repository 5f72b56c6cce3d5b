"""A batch that also says whether its rows need all the logits. Introduced in phase 12.1.

Each rank holds a part of the logits. If every row takes the arg-max of its unedited logits, each rank sends two numbers
instead of all its logits. Ranks must know this before they compute, and only the requests' parameters reveal it.

Invariant: ``takes_argmax`` changes no token.
"""

from dataclasses import dataclass, replace
from typing import Self

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.batch import Batch
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule


@dataclass(frozen=True)
class RankBatch(Batch):
    """Like :class:`Batch`, with what the other ranks need to know."""

    takes_argmax: bool = False

    @classmethod
    def of(cls, schedule: Schedule, pool: CachePoolProtocol) -> Self:
        takes_argmax = all(takes_plain_argmax(request.params) for request in schedule.requests)
        return replace(super().of(schedule, pool), takes_argmax=takes_argmax)


def takes_plain_argmax(params: SamplingParams) -> bool:
    """Whether a request's tokens are the arg-max of the raw logits, and nothing else needs the logits."""
    changes = params.has_penalties or params.logit_bias or params.min_tokens or params.structured_output is not None
    return params.is_greedy and not changes and params.logprobs is None
