"""Admission for shared prefixes: a request waits for the blocks that another is computing. Introduced in phase 8.

Fifty requests with the same prompt of 8,192 tokens arrive together. If all are admitted, each computes the prompt. Here
the first one computes it, and the others stay in the queue until its blocks are in the prefix tree; requests that share
nothing with it are admitted past them. If the first is aborted, fails or is preempted, the next one takes over.

Invariants: a request waits only for a running request, which progresses, so every request is admitted; apart from
requests that wait for blocks, requests are admitted in order of arrival.
"""

from collections.abc import Iterator

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.scheduling.chunked import ChunkedScheduler


class PrefixScheduler(ChunkedScheduler):
    """Chunked prefill for requests that share prefixes, if the pool has a prefix tree."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.is_sharing = config.is_on("use_prefix_caching")

    def _candidates(self) -> Iterator[Request]:
        """The waiting requests in order, without those that wait for blocks. Each is judged when its turn comes, since
        a request that has just been admitted may be computing what the next one needs.
        """
        return (request for request in super()._candidates() if not self.pool.must_wait(request))

    def _start(self, request: Request, num_cached: int) -> None:
        if self.is_sharing and not request.needs_prompt_logits:  # those look nothing up
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += num_cached
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_cached
        super()._start(request, num_cached)
