"""Static batching: a batch runs until its last request finishes. Introduced in phase 4.

One forward for many requests reads the weights once for all of them. The batch is closed while it runs: a new request
waits until the longest output is complete, and a finished request leaves its row empty until then.

A request is admitted only with KV cache for its prompt and its maximum output, so a running request never lacks memory.
Invariant: no request is admitted while any runs.
"""

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.scheduling.admission import admit, queued
from shared.scheduling.prefill import WholePrompts
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class StaticScheduler(Scheduler):
    """Admits a batch when no request runs. Prompts that exceed the token budget are prefilled over several steps."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = WholePrompts(config)

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        if not self.running:
            admit(self, queued(self), self.longest)
        decoding, prompts = self.decoding(), self.prefill.prompts(self.running.values())
        return Schedule(self.num_steps, self.prefill.fill(decoding, prompts), len(decoding))
