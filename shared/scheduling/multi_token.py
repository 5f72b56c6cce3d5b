"""Scheduling of mask tokens, whose hidden states become the next drafts. Introduced in phase 11.1.

A step with masks verifies the guesses of the step before, and makes those of the next. So a request's drafts of a step
are at most the masks that it had in the step before, and each of its real tokens is followed by a group of masks, since
it is not known which drafts will be right. Masks are granted last of all, after the drafts of every request.

A guess that is there is verified, even if guesses do not seem worthwhile: one row costs little, and without it nothing
would be learned about the request.

Invariants: those of :mod:`shared.scheduling.speculative`; after the commit nothing is left of mask tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.scheduling import speculative
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.speculative import SpeculativeScheduler


@dataclass(frozen=True)
class MultiTokenSchedule(Schedule):
    """A step in which each real token of some requests is followed by mask tokens."""

    masks: Mapping[Request, int] = field(default_factory=dict)  # k of each request that has masks

    @property
    def has_drafts(self) -> bool:
        """Whether an entry has drafts, or masks: the next step's drafts depend on this step's tokens."""
        return bool(self.masks) or super().has_drafts


class MultiTokenScheduler(SpeculativeScheduler):
    """As :class:`SpeculativeScheduler`; if ``config.adapter`` is set, the drafts are guesses of the model itself."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        if config.adapter is not None:
            self.lengths.attempt_steps = 2
        self.guesses: dict[Request, int] = {}  # made in the last step
        self.masks_wanted: dict[Request, int] = {}  # in the step that is planned

    def _wants_drafts(self, decoding: list[Request]) -> bool:
        return super()._wants_drafts(decoding) or bool(self.guesses)

    def _plan(self, decoding: Sequence[Request], prompts: Sequence[Request], preempted: Iterable[str] = ()) -> Schedule:
        """As :class:`SpeculativeScheduler` does, and mask tokens within the rest of the budget."""
        self.masks_wanted = {}
        schedule = super()._plan(decoding, prompts, preempted)
        budget = self.config.max_num_batched_tokens - int(schedule.num_tokens.sum())
        masks: dict[Request, int] = {}
        for entry in schedule.decoding:
            count = self._grant_masks(entry, budget)
            if count > 0:
                masks[entry.request] = count
                budget -= count * entry.num_tokens
        return with_masks(schedule, masks) if masks else schedule

    def _grant_drafts(self, entry: Scheduled, wanted: int, budget: int) -> Scheduled:
        if self.config.adapter is None:
            return super()._grant_drafts(entry, wanted, budget)
        self.masks_wanted[entry.request] = wanted
        return super()._grant_drafts(entry, min(max(wanted, 1), self.guesses.get(entry.request, 0)), budget)

    def _grant_masks(self, entry: Scheduled, budget: int) -> int:
        """The mask tokens behind each real token of an entry, for which KV cache is reserved."""
        request, n = entry.request, entry.num_tokens
        end, room = entry.start + n, self.pool.request_capacity
        useful = self._longest(request) - entry.start - 3  # drafts that the next step could verify
        count = min(self.masks_wanted.get(request, 0), useful, self.max_seq_len - end, budget // n, (room - end) // n)
        while count > 0 and not self.pool.reserve(request, end + n * count):
            count -= 1
        return max(count, 0)

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """See :class:`SpeculativeScheduler`; frees what stood for mask tokens."""
        super().commit(schedule, sampled)
        self.guesses = {}
        if isinstance(schedule, MultiTokenSchedule):
            for request, num_masks in schedule.masks.items():
                if request.status is RequestStatus.RUNNING:
                    # exercise 11.1x4: collate: keep the accepted tokens, and free the rest
                    # hint: the real tokens were laid down first, so what was accepted needs no copy
                    # hint: super().commit counted it: num_computed_tokens; pool.shrink gives back what is behind
                    # hint: the request now has num_masks guesses, which the next step may verify: self.guesses
                    self.pool.shrink(request, request.num_computed_tokens)
                    self.guesses[request] = num_masks
                    # end exercise

    def drop_in_flight(self) -> None:
        """See :class:`SpeculativeScheduler`."""
        super().drop_in_flight()
        self.guesses = {}


def settle(schedule: Schedule, pool: CachePoolProtocol) -> Schedule:
    """See :func:`shared.scheduling.speculative.settle`; a request with fewer drafts than granted loses its masks."""
    settled = speculative.settle(schedule, pool)
    if settled is schedule or not isinstance(schedule, MultiTokenSchedule):
        return settled
    granted = {entry.request: entry.num_drafts for entry in schedule}
    lost = {entry.request for entry in settled if entry.num_drafts != granted[entry.request]}
    masks = {request: count for request, count in schedule.masks.items() if request not in lost}
    return with_masks(settled, masks)


def with_masks(schedule: Schedule, masks: Mapping[Request, int]) -> MultiTokenSchedule:
    """The schedule with masks; decoding entries of one token stay the first: their attention has its own kernel."""
    entries = sorted(schedule.decoding, key=lambda entry: entry.num_drafts > 0 or entry.request in masks)
    about = (schedule.step, (*entries, *schedule.prompts), schedule.num_decoding, schedule.preempted)
    return MultiTokenSchedule(*about, masks=masks)
