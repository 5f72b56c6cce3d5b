"""Scheduling while a step runs: a preemption waits until the requests that end are known. Introduced in phase 9.

Step k is planned while step k - 1 runs. Lengths are counts, so a request that ends by its length is not scheduled
again. One that ends by a token (end of sequence, a stop string) is scheduled once more, and this row is computed and
dropped. That row needs a slot, and in an exhausted pool a request would be preempted for it. So if the pool cannot
hold the next token of every decoding request and tokens are in flight, nothing is scheduled: the engine finishes the
step in flight, and the next one is planned with all tokens known, as in phase 8.

Invariant: a request is preempted only while no sampled token is in flight.
"""

from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.sampling.sampler import SampledTokens
from shared.scheduling.admission import admit
from shared.scheduling.chunks import prefill_of
from shared.scheduling.growth import grow, known_tokens
from shared.scheduling.next_tokens import commit_next_tokens, grant_next_tokens, only_decoding
from shared.scheduling.policies import share
from shared.scheduling.prefix import count_prefix_hits, not_waiting_for_blocks, prefix_stats
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class OverlappedScheduler(Scheduler):
    """Schedules with at most one step in flight."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = prefill_of(config)

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`; empty if the step in flight must be finished first."""
        if has_block_for_each(self):
            if decoding := only_decoding(self, self.running.values()):
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
        entries = self.prefill.fill(decoding, prompts)
        return Schedule(self.num_steps, entries, len(decoding), tuple(preempted))

    def stats(self) -> dict[str, Any]:
        """See :class:`Scheduler`."""
        return prefix_stats(self)

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """See :class:`Scheduler`."""
        if schedule.is_decode and not sampled.errors:
            commit_next_tokens(self, schedule, sampled)
        else:
            super().commit(schedule, sampled)


def has_block_for_each(scheduler: Scheduler) -> bool:
    """Whether the pool has enough free blocks that no running request lacks memory for its next token."""
    return scheduler.pool.free_tokens >= len(scheduler.running) * scheduler.config.block_size


def must_know_ends(scheduler: Scheduler) -> bool:
    """Whether a request would be preempted although one may have ended in the step in flight."""
    # exercise 09x3: one row too many
    # hint: if no decoding request (scheduler.decoding) has pending tokens, every end is known
    # hint: otherwise try to reserve for each what `grow` reserves; a failure means that one would be preempted
    # hint: reserve keeps what it has reserved, so trying costs nothing
    decoding, reserve = scheduler.decoding(), scheduler.pool.reserve
    if not any(request.num_pending_tokens for request in decoding):
        return False
    return not all(reserve(request, request.num_tokens + request.num_pending_tokens) for request in decoding)
    # end exercise
