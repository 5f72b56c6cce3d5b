"""Chunked prefill: long prompts are computed over several steps, alongside decoding. Introduced in phase 7.

A whole prompt of 8,192 tokens makes a step a hundred times longer, and every decoding request waits for it. In chunks
(Sarathi-Serve: Agrawal et al., OSDI 2024) the decoding requests get a token between any two chunks, and a step with
both reads each weight once for all its tokens. A chunk attends to the keys of the chunks before it, so the results are
the same as for the whole prompt; only the step that computes the last known token of a request samples. How a step is
filled: :mod:`shared.scheduling.chunks`.

Invariant: the KV cache of a whole prompt is reserved at admission, so a chunk never lacks memory.
"""

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.scheduling.admission import admit, queued
from shared.scheduling.chunks import prefill_of
from shared.scheduling.growth import grow, known_tokens
from shared.scheduling.policies import share
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class ChunkedScheduler(Scheduler):
    """Divides prompts into chunks; without ``use_chunked_prefill`` they stay whole."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = prefill_of(config)

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
