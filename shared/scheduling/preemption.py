"""Optimistic admission, and what follows when it was too optimistic. Introduced in phase 6.

Most answers end long before the longest that they may have, so memory kept for the longest is mostly kept for nothing.
Here a request is admitted with memory for the tokens it has, and is granted one more in every step. When none is left,
the request that was admitted last is *preempted*: it gives up its memory and waits again, first in the queue. Its keys
and values are computed anew when it is admitted again, prompt and answer so far in one forward (recomputation, as in
vLLM: Kwon et al., SOSP 2023, section 4.5); its tokens are kept, and noise depends on a token's index alone, so the
answer goes on as if nothing had been.

To admit a request and to preempt one in the next step would be work for nothing, so admission leaves a watermark of
free memory to running requests, and none joins in a step in which one was preempted. A pool whose grants never grow has
no watermark and needs no preemption.

Invariants: FCFS: every running request came before every waiting one, and the oldest running request is never preempted
for another; a request must fit an empty pool to be queued; so every request finishes.
"""

from collections.abc import Sequence

from shared.engine.request import Request, RequestStatus
from shared.scheduling.policies import POLICIES
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class PreemptiveScheduler(Scheduler):
    """Admits with memory for the tokens there are, and takes it back from the youngest."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        decoding = self._decoding()
        preempted = self._grow(decoding)
        if preempted:
            decoding = [request for request in decoding if request.status is RequestStatus.RUNNING]
        else:
            self._admit(lambda request: request.num_tokens, num_kept_free=self.pool.watermark_tokens)
        policy = POLICIES[self.config.scheduler_policy]
        steps_since = [self.num_steps - request.last_step for request in decoding]
        shared = policy.share(self._prompts(), decoding, steps_since, self.config.max_decode_interval)
        return self._plan(*shared, preempted)

    def _grow(self, decoding: Sequence[Request]) -> list[str]:
        """Grant each decoding request the token that it will write; the ids of those that were preempted for it.

        Args:
            decoding: in the order they were admitted.
        """
        preempted = []
        # exercise 06x3: the oldest gets memory first
        # hint: go through the requests, the oldest first; each needs memory for the tokens it has and those in flight:
        # hint: num_tokens + num_pending_tokens
        # hint: while the pool refuses, preempt the youngest of those that run, which may be the request itself
        # hint: a request that was preempted holds nothing and asks for nothing: look whether it still runs
        for request in decoding:
            while request.request_id in self.running:
                if self.pool.reserve(request, request.num_tokens + request.num_pending_tokens):
                    break
                youngest = next(reversed(self.running.values()))
                self._preempt(youngest)
                preempted.append(youngest.request_id)
        # end exercise
        return preempted

    def _preempt(self, request: Request) -> None:
        """Take back all its memory, and put it at the head of the queue."""
        # exercise 06x4: forget what was computed, and nothing else
        # hint: the pool takes back the memory; no tokens of the request are computed any more, and none is in flight
        # hint: OrderedDict.move_to_end(key, last=False) puts an entry first
        self.pool.release(request)
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_pending_tokens = 0
        request.status = RequestStatus.PREEMPTED
        del self.running[request.request_id]
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        # end exercise
        self.num_preemptions += 1
