"""Admission with shared prefixes: a request waits for blocks that another request is computing. Introduced in phase 8.

Fifty requests with the same prompt of 8,192 tokens arrive together. If all are admitted, each computes the prompt. Here
the first one computes it, and the others stay in the queue until its blocks are in the prefix tree; requests that share
nothing with it are admitted past them. If the first is aborted, fails or is preempted, the next one takes over.

Invariants: a request waits only for a running request, which makes progress, so every request is admitted; apart from
requests that wait for blocks, requests are admitted in order of arrival.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.scheduling.admission import admit, queued
from shared.scheduling.chunks import prefill_of
from shared.scheduling.growth import grow, known_tokens
from shared.scheduling.policies import share
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class PrefixScheduler(Scheduler):
    """Holds back a request while another computes the blocks that both share, if the pool has a prefix tree."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = prefill_of(config)

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
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


def not_waiting_for_blocks(scheduler: Scheduler) -> Iterator[Request]:
    """The waiting requests in order, without those that wait for blocks.

    Each is checked when its turn comes: a request that has just been admitted may be computing what the next one needs.
    """
    return (request for request in queued(scheduler) if not scheduler.pool.must_wait(request))


def count_prefix_hits(scheduler: Scheduler, admitted: Iterable[Request]) -> None:
    """Count the tokens of admitted requests that were looked up and found in the prefix tree."""
    if scheduler.config.is_on("use_prefix_caching"):
        for request in admitted:
            if not request.needs_prompt_logits:  # these skip the lookup
                scheduler.num_prefix_queries += request.num_tokens
                scheduler.num_prefix_hits += request.num_computed_tokens


def prefix_stats(scheduler: Scheduler) -> dict[str, int]:
    """The tokens looked up and found, for an engine's ``stats``."""
    return {
        "prefix cache queries (tokens)": scheduler.num_prefix_queries,
        "prefix cache hits (tokens)": scheduler.num_prefix_hits,
    }
