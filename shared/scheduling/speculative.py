"""Scheduling with drafts: tokens that are computed before they are known to be right. Introduced in phase 11.

The number of drafts of each request follows from counts (:mod:`shared.speculation.adaptive`), and drafts are granted
last (:mod:`shared.scheduling.drafts`). A grant is an upper bound: the drafter may propose fewer.

Invariants: those of :class:`shared.scheduling.overlapped.OverlappedScheduler`; a step with drafts is committed before
the next one is scheduled.
"""

from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.sampling.sampler import SampledTokens
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


class SpeculativeScheduler(Scheduler):
    """Schedules with at most one step in flight, and drafts after the tokens of decoding requests."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = prefill_of(config)
        self.lengths = draft_lengths(config)
        self.had_drafts = False  # as in the last planned step; the next one then mostly has drafts too
        self.num_drafts_by_position = [0] * self.lengths.longest
        self.num_accepted_by_position = [0] * self.lengths.longest

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`; empty if the step in flight must be finished first."""
        wanted = None
        if has_block_for_each(self):
            if not self.had_drafts and (decoding := only_decoding(self, self.running.values())):
                wanted = self.lengths.wanted(decoding)
                if not any(wanted.values()):
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
        schedule = grant_drafts(self, schedule, wanted)
        self.had_drafts = schedule.has_drafts
        return schedule

    def stats(self) -> dict[str, Any]:
        """See :class:`Scheduler`."""
        return prefix_stats(self) | draft_stats(self)

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """See :class:`Scheduler`; only accepted drafts are counted as tokens."""
        if schedule.has_drafts:
            commit_drafts(self, self.lengths, schedule, sampled)
        elif schedule.is_decode and not sampled.errors:
            commit_next_tokens(self, schedule, sampled)
        else:
            super().commit(schedule, sampled)

    def drop_in_flight(self) -> None:
        """See :class:`Scheduler`; what was reserved for drafts is given back."""
        super().drop_in_flight()
        if self.lengths.longest:
            give_back(self)
