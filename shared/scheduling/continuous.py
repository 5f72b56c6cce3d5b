"""Continuous batching: waiting requests replace finished ones in every step. Introduced in phase 5.

Iteration-level scheduling (Orca: Yu et al., OSDI 2022). The scheduler forms a new batch for each step: finished
requests have left, and newly admitted ones have joined. The policy (:mod:`shared.scheduling.policies`) decides how much
a prefill may delay decoding requests. Invariants: the head of the queue waits only while the batch is full or the KV
cache has no space for it; a decoding request gets a token at least once in ``max_decode_interval`` steps.
"""

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.scheduling.admission import admit, queued
from shared.scheduling.policies import share
from shared.scheduling.prefill import WholePrompts
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class ContinuousScheduler(Scheduler):
    """Admits in every step; the policy decides how prefill and decode share the step."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = WholePrompts(config)

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        admit(self, queued(self), self.longest)
        decoding, prompts = share(self, self.decoding(), self.prefill.prompts(self.running.values()))
        return Schedule(self.num_steps, self.prefill.fill(decoding, prompts), len(decoding))
