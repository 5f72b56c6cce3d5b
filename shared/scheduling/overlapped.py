"""Scheduling while a step runs: preemption waits until it is known which requests end. Introduced in phase 9.

Step k is planned while step k - 1 runs. Lengths are counts, so a request that ends by its length is not scheduled
again. One that ends by a token (end of sequence, a stop string) is scheduled once more, for a row that is computed and
dropped. That row needs a slot, and if the pool is exhausted a request would be preempted for it. So if the pool cannot
hold the next token of every decoding request and tokens are in flight, nothing is scheduled: the engine finishes the
step in flight, and the next one is planned with all tokens known, as in phase 8.

Most steps admit nothing and give each running request its next token. Such a step is planned by a path of its own, with
one pass over the requests in place of one for each question; the schedule, and the counts, are those of the long way.

Invariant: a request is preempted only while no sampled token is in flight.
"""

from collections.abc import Iterable
from itertools import compress

from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.schedule import Schedule


class OverlappedScheduler(PrefixScheduler):
    """As :class:`PrefixScheduler`, with at most one step in flight when it schedules."""

    def schedule(self) -> Schedule:
        """See :class:`shared.scheduling.scheduler.Scheduler`; empty if the step in flight must be finished first."""
        has_room = self.pool.free_tokens >= len(self.running) * self.config.block_size  # for a block for each
        decoding = self._all_decoding() if has_room and self.decodes_plainly else []
        if decoding and not self._wants_drafts(decoding):
            return self._next_tokens(decoding)
        return super().schedule() if has_room or not self._must_know_ends() else Schedule(self.num_steps)

    @property
    def decodes_plainly(self) -> bool:
        """Whether a request that decodes gets its next token in every step."""
        return True

    def _wants_drafts(self, decoding: list[Request]) -> bool:
        """Whether one of the requests is to have drafts in the step that is planned (phase 11); asked once a step."""
        return False

    def _taking_part(self) -> Iterable[Request]:
        """The running requests that the next step may compute."""
        return self.running.values()

    def _all_decoding(self) -> list[Request]:
        """What ``_decoding`` returns, with memory reserved for what each writes; empty if the next step admits or
        prefills a request.
        """
        if self.waiting and len(self.running) < self.config.max_batch_size:
            return []
        decoding, max_seq_len = [], self.max_seq_len
        for request in self._taking_part():
            start, num_prompt = request.num_scheduled_tokens, request.num_prompt_tokens
            num_pending = request.num_pending_tokens
            end = request.num_tokens + num_pending
            if start < num_prompt or start + 1 < end:
                return []  # a prefill
            is_complete = end >= max_seq_len or end - num_prompt >= request.params.max_new_tokens
            if start + 1 == end and not (num_pending and is_complete):
                decoding.append(request)
        others = self.pool.reserve_next(decoding)
        if all(self.pool.reserve(request, request.num_tokens + request.num_pending_tokens) for request in others):
            return decoding
        return []

    def _next_tokens(self, decoding: list[Request]) -> Schedule:
        """Schedule the next token of each request."""
        self.num_steps += 1
        starts = [request.num_scheduled_tokens for request in decoding]
        for request in decoding:
            request.num_scheduled_tokens += 1
            request.num_pending_tokens += 1
        return Schedule.of_decoding(self.num_steps, decoding, starts)

    def _must_know_ends(self) -> bool:
        """Whether a request would be preempted although one may have ended in the step in flight."""
        # exercise 09x3: one row too many
        # hint: if no decoding request has pending tokens, every end is known
        # hint: otherwise try to reserve for each what _grow reserves; a failure means that one would be preempted
        # hint: reserve keeps what it has reserved, so trying costs nothing
        decoding = self._decoding()
        if not any(request.num_pending_tokens for request in decoding):
            return False
        return not all(
            self.pool.reserve(request, request.num_tokens + request.num_pending_tokens) for request in decoding
        )
        # end exercise

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """See :class:`shared.scheduling.scheduler.Scheduler`; a step that only decodes gives each request one token."""
        if sampled.errors or not schedule.is_decode:
            super().commit(schedule, sampled)
            return
        requests, starts, running = schedule.requests, schedule.columns["start"], RequestStatus.RUNNING
        columns = zip(requests, starts, strict=True)
        is_awaited = [request.status is running and request.num_computed_tokens == start for request, start in columns]
        awaited = list(compress(requests, is_awaited))
        self.pool.commit_next(awaited)
        for request, (token_id, logprobs) in zip(awaited, compress(sampled, is_awaited), strict=True):
            request.num_computed_tokens += 1
            request.num_pending_tokens -= 1
            request.last_step = schedule.step
            request.append(token_id, logprobs)
        if self.ending:
            for request, start in zip(requests, starts, strict=True):
                if request in self.ending and request.num_scheduled_tokens == start + 1:
                    del self.ending[request]  # no later step computes it
                    self.pool.release(request)
