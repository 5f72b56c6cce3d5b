"""Continuous batching: a request that ends makes room for the next, in every step. Introduced in phase 5.

Iteration-level scheduling (Orca: Yu et al., OSDI 2022). The batch is put together anew for each step: answers that
ended are gone, and requests that came have their places. What a prompt's forward costs the answers beside it is the
policy's affair, see :mod:`shared.scheduling.policies`. Invariants: the first of the queue waits only while there is no
place or no memory for it; a decoding request gets a token at least once in ``max_decode_interval`` steps.
"""

from shared.scheduling.policies import POLICIES
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class ContinuousScheduler(Scheduler):
    """Admits in every step; the policy says how prompts and decoding share it."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        # exercise 05x3: put the batch together anew
        # hint: admit in every step, and not only when none runs: _admit, with memory for the longest answer (_longest)
        # hint: _prompts gives the requests whose prompts fit this step, _decoding those that can get their next token
        # hint: policy.share says which of both take part; it wants the steps since each decoding one's last token:
        # hint: num_steps less last_step
        self._admit(self._longest)
        decoding = self._decoding()
        policy = POLICIES[self.config.scheduler_policy]
        steps_since = [self.num_steps - request.last_step for request in decoding]
        shared = policy.share(self._prompts(), decoding, steps_since, self.config.max_decode_interval)
        return self._plan(*shared)
        # end exercise
