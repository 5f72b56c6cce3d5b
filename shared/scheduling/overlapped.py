"""Scheduling while a step runs: preemption waits until it is known which requests end. Introduced in phase 9.

Step k is planned while step k - 1 runs. Lengths are counts, so a request that ends by its length is not scheduled
again. One that ends by a token (end of sequence, a stop string) is scheduled once more, for a row that is computed and
dropped. That row needs a slot, and if the pool is exhausted a request would be preempted for it. So if the pool cannot
hold the next token of every decoding request and tokens are in flight, nothing is scheduled: the engine finishes the
step in flight, and the next one is planned with all tokens known, as in phase 8.

Invariant: a request is preempted only while no sampled token is in flight.
"""

from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.schedule import Schedule


class OverlappedScheduler(PrefixScheduler):
    """As :class:`PrefixScheduler`, with at most one step in flight when it schedules."""

    def schedule(self) -> Schedule:
        """See :class:`shared.scheduling.scheduler.Scheduler`; empty if the step in flight must be finished first."""
        has_room = self.pool.free_tokens >= len(self.running) * self.config.block_size  # for a block for each
        return super().schedule() if has_room or not self._must_know_ends() else Schedule(self.num_steps)

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
