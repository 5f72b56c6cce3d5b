"""Static batching: a batch runs until its last request finishes. Introduced in phase 4.

One forward for many requests reads the weights once for all of them. The batch is closed while it runs: a new request
waits until the longest output is complete, and a finished request leaves its row empty until then. Invariant: no
request is admitted while any runs.
"""

from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class StaticScheduler(Scheduler):
    """Admits a batch when no request runs. Prompts that exceed the token budget are prefilled over several steps."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        if not self.running:
            self._admit(self._longest)
        return self._plan(self._decoding(), self._prompts())
