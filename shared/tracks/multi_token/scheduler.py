"""Scheduling of mask tokens, whose hidden states become the next drafts. Introduced in phase 11.1.

A step with masks verifies the previous step's guesses and makes the next step's. So a request has at most as many
drafts in a step as it had masks in the previous one. Each of its real tokens is followed by a group of masks, since it
is not yet known which drafts are right. Masks are granted last, after the drafts of every request.

An existing guess is verified even if guessing no longer seems worthwhile: a row costs little, and without it the
request's acceptance rate could not be estimated.

Invariants: those of :mod:`shared.scheduling.speculative` and :mod:`shared.scheduling.drafts`; after the commit no mask
token holds a slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.scheduling import drafts
from shared.scheduling.admission import admit
from shared.scheduling.chunks import prefill_of
from shared.scheduling.drafts import commit_drafts, draft_stats, give_back, grant_drafts
from shared.scheduling.growth import grow, known_tokens
from shared.scheduling.next_tokens import commit_next_tokens, grant_next_tokens, only_decoding
from shared.scheduling.overlapped import has_block_for_each, must_know_ends
from shared.scheduling.policies import share
from shared.scheduling.prefix import count_prefix_hits, not_waiting_for_blocks, prefix_stats
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.speculation.adaptive import draft_lengths


@dataclass(frozen=True)
class MultiTokenSchedule(Schedule):
    """A step in which each real token of some requests is followed by mask tokens."""

    masks: Mapping[Request, int] = field(default_factory=dict)  # k for each request that has masks

    @property
    def has_drafts(self) -> bool:
        """Whether an entry has drafts, or masks: the next step's drafts depend on this step's tokens."""
        return bool(self.masks) or super().has_drafts


class MultiTokenScheduler(Scheduler):
    """Schedules like :class:`shared.scheduling.speculative.SpeculativeScheduler`; if ``config.adapter`` is set, the
    drafts are the model's own guesses, made from the previous step's mask tokens.
    """

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = prefill_of(config)
        self.lengths = draft_lengths(config)
        self.is_guessing = config.adapter is not None
        if self.is_guessing:
            self.lengths.attempt_steps = 2
        self.had_drafts = False  # as in the last planned step; the next one then mostly has drafts too
        self.guesses: dict[Request, int] = {}  # made in the last step
        self.num_drafts_by_position = [0] * self.lengths.longest
        self.num_accepted_by_position = [0] * self.lengths.longest

    def schedule(self) -> Schedule:
        """Empty if the step in flight must be finished first."""
        wanted = None
        if has_block_for_each(self):
            if not self.had_drafts and (decoding := only_decoding(self, self.running.values())):
                wanted = self.lengths.wanted(decoding)
                if not (self.guesses or any(wanted.values())):
                    return grant_next_tokens(self, decoding)
        elif must_know_ends(self):
            return Schedule(self.num_steps)
        self.num_steps += 1
        decoding = self.decoding()
        preempted = grow(self, decoding)
        ready = not_waiting_for_blocks(self)
        admitted = [] if preempted else admit(self, ready, known_tokens, self.pool.watermark_tokens)
        count_prefix_hits(self, admitted)
        if preempted or admitted:
            decoding = self.decoding()
        decoding, prompts = share(self, decoding, self.prefill.prompts(self.running.values()))
        if wanted is None:  # called once per step
            wanted = self.lengths.wanted(decoding)
        entries = self.prefill.fill(decoding, prompts)
        schedule = Schedule(self.num_steps, entries, len(decoding), tuple(preempted))
        if not self.is_guessing:
            schedule = grant_drafts(self, schedule, wanted)
            self.had_drafts = schedule.has_drafts
            return schedule
        schedule = grant_drafts(self, schedule, self.verifiable(wanted))
        self.had_drafts = schedule.has_drafts
        return self.grant_masks(schedule, wanted)

    def verifiable(self, wanted: Mapping[Request, int]) -> dict[Request, int]:
        """The existing guesses to verify: as many as wanted, and at least one."""
        return {request: min(max(wanted.get(request, 0), 1), count) for request, count in self.guesses.items()}

    def grant_masks(self, schedule: Schedule, wanted: Mapping[Request, int]) -> Schedule:
        """The schedule with mask tokens after each real token, as far as the budget and the KV cache allow."""
        budget = self.config.max_num_batched_tokens - int(schedule.num_tokens.sum())
        masks: dict[Request, int] = {}
        for request, start, n, *_ in schedule.decoding:
            end, room = start + n, self.pool.request_capacity
            useful = self.longest(request) - start - 3  # drafts that the next step could verify
            count = min(wanted.get(request, 0), useful, budget // n, (room - end) // n)
            while count > 0 and not self.pool.reserve(request, end + n * count):
                count -= 1
            if count > 0:
                masks[request] = count
                budget -= count * n
        return with_masks(schedule, masks) if masks else schedule

    def stats(self) -> dict[str, Any]:
        return prefix_stats(self) | draft_stats(self)

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """Only accepted drafts are counted; what was reserved for mask tokens is freed."""
        if schedule.has_drafts:
            commit_drafts(self, self.lengths, schedule, sampled)
        elif schedule.is_decode and not sampled.errors:
            commit_next_tokens(self, schedule, sampled)
        else:
            super().commit(schedule, sampled)
        self.guesses = {}
        if isinstance(schedule, MultiTokenSchedule):
            for request, num_masks in schedule.masks.items():
                if request.status is RequestStatus.RUNNING:
                    # exercise 11.1x4: collate: keep the accepted tokens, and free the rest
                    # hint: the real tokens were laid down first, so accepted tokens need no copy
                    # hint: it is counted: num_computed_tokens; pool.shrink gives back what comes after it
                    # hint: the request now has num_masks guesses, which the next step may verify: self.guesses
                    self.pool.shrink(request, request.num_computed_tokens)
                    self.guesses[request] = num_masks
                    # end exercise

    def drop_in_flight(self) -> None:
        """What was reserved for drafts and masks is released."""
        super().drop_in_flight()
        self.guesses = {}
        if self.lengths.longest:
            give_back(self)


def settle(schedule: Schedule, pool: CachePoolProtocol) -> Schedule:
    """See :func:`shared.scheduling.drafts.settle`; a request with fewer drafts than granted loses its masks."""
    settled = drafts.settle(schedule, pool)
    if settled is schedule or not isinstance(schedule, MultiTokenSchedule):
        return settled
    granted = {entry.request: entry.num_drafts for entry in schedule}
    lost = {entry.request for entry in settled if entry.num_drafts != granted[entry.request]}
    masks = {request: count for request, count in schedule.masks.items() if request not in lost}
    return with_masks(settled, masks)


def with_masks(schedule: Schedule, masks: Mapping[Request, int]) -> MultiTokenSchedule:
    """The schedule with masks; one-token decoding entries stay first, since their attention has its own kernel."""
    entries = sorted(schedule.decoding, key=lambda entry: entry.num_drafts > 0 or entry.request in masks)
    arguments = (schedule.step, (*entries, *schedule.prompts), schedule.num_decoding, schedule.preempted)
    return MultiTokenSchedule(*arguments, masks=masks)
