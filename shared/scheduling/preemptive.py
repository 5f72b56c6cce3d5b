"""Optimistic admission: Reserves KV cache for the tokens that a request has, not for those that it might generate.
Introduced in phase 6.

Most requests finish long before their maximum length, so most of the KV cache reserved for that length is never
written. This scheduler admits a request with KV cache for its current tokens, and reserves one more token in every
step; when the pool is exhausted, it preempts the youngest request (:mod:`shared.scheduling.growth`).

Admitting a request only to preempt one in the next step wastes a prefill. So admission leaves a watermark of free
tokens to running requests, and a step that preempts admits none. A pool that reserves the maximum length at admission
has no watermark and never preempts.

Invariant: a request must fit an empty pool to be queued, and the oldest is never preempted, so every request finishes.
"""

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.scheduling.admission import admit, queued
from shared.scheduling.growth import grow, known_tokens
from shared.scheduling.policies import share
from shared.scheduling.prefill import WholePrompts
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class PreemptiveScheduler(Scheduler):
    """Reserves KV cache for current tokens only, and preempts the youngest request when the pool is exhausted."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = WholePrompts(config)

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        decoding = self.decoding()
        preempted = grow(self, decoding)
        admitted = [] if preempted else admit(self, queued(self), known_tokens, self.pool.watermark_tokens)
        if preempted or admitted:
            decoding = self.decoding()
        decoding, prompts = share(self, decoding, self.prefill.prompts(self.running.values()))
        entries = self.prefill.fill(decoding, prompts)
        return Schedule(self.num_steps, entries, len(decoding), tuple(preempted))
