"""Continuous batching: whoever ends makes room for the next, in every step. Introduced in phase 5.

Iteration-level scheduling (Orca: Yu et al., OSDI 2022). The batch is put together anew for each step: answers that
ended are gone, and requests that came have their places. What a prompt's forward costs the answers beside it is the
policy's affair, see :mod:`shared.scheduling.policies`. Invariants: the first of the queue waits only while there is no
place or no memory for it; a decoding request gets a token at least once in ``max_decode_interval`` steps.
"""

from shared.engine.request import RequestStatus
from shared.scheduling.policies import POLICIES
from shared.scheduling.scheduler import Schedule, Scheduler


class ContinuousScheduler(Scheduler):
    """Admits in every step; the policy says how prompts and decoding share it."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        # exercise 05.3: put the batch together anew
        # hint: admit whom there is room for, in every step, and not only when nobody runs
        # hint: _prompts gives those whose prompts fit this step; at most policy.max_prompts of them (None: all) are run
        # hint: everybody with the status DECODE gets a token; but beside prompts only whom policy.turns chooses
        # hint: turns wants the steps since each one's last token: num_steps less last_step
        self._admit()
        policy = POLICIES[self.config.scheduler_policy]
        prompts = self._prompts()[: policy.max_prompts]
        decoding = list(self._with(RequestStatus.DECODE))
        if prompts:
            steps_since = [self.num_steps - request.last_step for request in decoding]
            turns = policy.turns(steps_since, self.config.max_decode_interval)
            decoding = [request for request, has_turn in zip(decoding, turns, strict=True) if has_turn]
        return Schedule(tuple(prompts), tuple(decoding))
        # end exercise
