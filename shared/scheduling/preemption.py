"""Optimistic admission, and what follows when it was too optimistic. Introduced in phase 6.

Most answers end long before the longest that they may have, so memory kept for the longest is mostly kept for nothing.
Here a request is admitted with memory for the tokens it has, and is granted one more in every step. When none is left,
whoever was admitted last gives up its own and waits again, first in the queue: it is *preempted*. Its keys and values
are computed anew when it is admitted again, prompt and answer so far in one forward (recomputation, as in vLLM: Kwon et
al., SOSP 2023, section 4.5); its tokens are kept, and noise depends on a token's index alone, so the answer goes on as
if nothing had been.

To admit somebody and to preempt somebody in the next step would be work for nothing, so admission leaves a watermark of
free memory to those that run, and nobody joins in a step in which somebody had to leave. A pool whose grants never grow
has no watermark and nobody is ever preempted.

Invariants: who runs came before whoever waits; the one that came first is never preempted by another, and with all the
memory it can end, since nothing is queued that an empty pool could not hold; so every request ends.
"""

from dataclasses import replace

from shared.engine.request import Request, RequestStatus
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.scheduler import Schedule


class PreemptiveScheduler(ContinuousScheduler):
    """Admits with memory for what there is, and takes it back from the youngest."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.preempted = self._grow()
        return replace(super().schedule(), preempted=self.preempted)

    def _grow(self) -> tuple[str, ...]:
        """Grant each decoding request the token that it will write; the ids of those that had to give way."""
        preempted = []
        # exercise 06.3: who came first gets memory first
        # hint: go through the requests that decode, the oldest first; what each needs now is its num_tokens
        # hint: while the pool refuses, preempt the youngest of those that run, which may be the request itself
        # hint: who was preempted holds nothing and asks for nothing: look whether a request still runs
        # hint: _preempt changes self.running: make a list of the requests before you begin
        for request in list(self._with(RequestStatus.DECODE)):
            while request.request_id in self.running:
                if self.pool.reserve(request.request_id, request.num_tokens):
                    break
                youngest = next(reversed(self.running.values()))
                self._preempt(youngest)
                preempted.append(youngest.request_id)
        # end exercise
        return tuple(preempted)

    def _preempt(self, request: Request) -> None:
        """Take back all its memory, and put it at the head of the queue."""
        # exercise 06.4: forget what was computed, and nothing else
        # hint: the pool takes back the memory, and the request has no computed tokens any more
        # hint: OrderedDict.move_to_end(key, last=False) puts an entry first
        self.pool.release(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        del self.running[request.request_id]
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        # end exercise
        self.num_preemptions += 1

    def _admit(self) -> None:
        if not self.preempted:
            super()._admit()

    def _reserve(self, request: Request) -> bool:
        """Ask the pool for the tokens that the request has; the watermark counts only while somebody runs."""
        kept = self.pool.watermark_tokens if self.running else 0
        if self.pool.free_tokens - kept < request.num_tokens:
            return False
        return self.pool.reserve(request.request_id, request.num_tokens)
