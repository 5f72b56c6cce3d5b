"""Static batching: a batch is put together, and runs until its last answer ends. Introduced in phase 4.

One forward for many requests reads the weights once for all of them. The batch is closed while it runs: a request that
comes waits for its longest answer, and a place whose answer has ended stays empty until then. Invariant: no request is
admitted while any runs.
"""

from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler


class StaticScheduler(Scheduler):
    """Admits a batch when none runs. A batch whose prompts are too long for one step takes several to start."""

    def schedule(self) -> Schedule:
        """See :class:`Scheduler`."""
        self.num_steps += 1
        if not self.running:
            self._admit(self._longest)
        return self._plan(self._decoding(), self._prompts())
