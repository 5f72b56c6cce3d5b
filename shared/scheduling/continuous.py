"""Continuous batching: waiting requests replace finished ones in every step. Introduced in phase 5.

Iteration-level scheduling (Orca: Yu et al., OSDI 2022). The scheduler forms a new batch for each step: finished
requests have left, and newly admitted ones have joined. How much a prefill may delay the decoding requests is up to the
policy, see :mod:`shared.scheduling.policies`. Invariants: the head of the queue waits only while the batch is full or
the KV cache has no room for it; a decoding request gets a token at least once in ``max_decode_interval`` steps.
"""

from shared.scheduling.policies import POLICIES
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class ContinuousScheduler(Scheduler):
    """Admits in every step; the policy decides how prefill and decode share the step."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        # exercise 05x3: form a new batch in every step
        # hint: admit in every step, not only when no request runs: _admit, reserving for the longest output (_longest)
        # hint: _prompts returns the requests whose prompts fit this step, _decoding those that can get their next token
        # hint: policy.share selects from both; it takes the steps since the last token of each decoding request:
        # hint: num_steps minus last_step
        self._admit(self._longest)
        decoding = self._decoding()
        policy = POLICIES[self.config.scheduler_policy]
        steps_since = [self.num_steps - request.last_step for request in decoding]
        shared = policy.share(self._prompts(), decoding, steps_since, self.config.max_decode_interval)
        return self._plan(*shared)
        # end exercise
