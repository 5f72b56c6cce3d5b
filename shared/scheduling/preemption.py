"""Optimistic admission, with preemption when the KV cache runs out. Introduced in phase 6.

Most requests finish long before their maximum length, so most of the KV cache reserved for that length is never
written. This scheduler admits a request with KV cache for its current tokens, and reserves one more token in every
step. When the pool is exhausted, it *preempts* the request that was admitted last: it frees its KV cache and moves it
to the head of the queue. Readmission recomputes its keys and values, prompt and outputs in one forward (recomputation,
as in vLLM: Kwon et al., SOSP 2023, section 4.5). The request keeps its tokens, and sampling noise depends on a token's
index alone, so its output is the same as without preemption.

Admitting a request only to preempt one in the next step wastes a prefill. So admission leaves a watermark of free
tokens to running requests, and a step that preempts admits none. A pool that reserves the maximum length at admission
has no watermark and never preempts.

Invariants: FCFS: every running request arrived before every waiting one; the oldest running request is never preempted,
and a request must fit an empty pool to be queued, so every request finishes.
"""

from collections.abc import Sequence

from shared.engine.request import Request, RequestStatus
from shared.scheduling.policies import POLICIES
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class PreemptiveScheduler(Scheduler):
    """Reserves KV cache for current tokens only, and preempts the youngest request when the pool is exhausted."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        decoding = self._decoding()
        preempted = self._grow(decoding)
        num_running = len(self.running)
        if not preempted:
            self._admit(lambda request: request.num_tokens, num_kept_free=self.pool.watermark_tokens)
        if preempted or len(self.running) > num_running:
            decoding = self._decoding()
        policy = POLICIES[self.config.scheduler_policy]
        steps_since = [self.num_steps - request.last_step for request in decoding]
        shared = policy.share(self._prompts(), decoding, steps_since, self.config.max_decode_interval)
        return self._plan(*shared, preempted)

    def _grow(self, decoding: Sequence[Request]) -> list[str]:
        """Reserve KV cache for the token that each decoding request writes; return the ids of preempted requests.

        Args:
            decoding: in the order of admission.
        """
        preempted = []
        # exercise 06x3: reserve for the oldest request first
        # hint: iterate from the oldest request; each needs KV cache for its known tokens and those in flight:
        # hint: num_tokens + num_pending_tokens
        # hint: while reserve fails, preempt the youngest running request, which may be the request itself
        # hint: skip requests that have been preempted: check that the request still runs
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
        """Free the request's KV cache and move it to the head of the queue."""
        # exercise 06x4: drop the computed state, keep the tokens
        # hint: release the request's blocks; reset the counts of computed, scheduled and pending tokens
        # hint: OrderedDict.move_to_end(key, last=False) puts an entry first
        self.pool.release(request)
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_pending_tokens = 0
        request.status = RequestStatus.PREEMPTED
        del self.running[request.request_id]
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        # end exercise
        self.num_preemptions += 1
