"""The interface of a drafter, which proposes tokens for the model to verify. Introduced in phase 11.

The scheduler grants drafts as counts; a drafter fills them with token ids. Invariants: a request has at most as many
drafts as its entry of the schedule grants; drafts follow the request's known tokens, so no token of it is in flight.

A draft model's drafts stay on the device, where the verifying step reads them. So the host prepares and launches that
step meanwhile, and waits for the ids only to sample and to accept.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.view.interface import MakeMemory
from shared.engine.runner import MakeRunner
from shared.scheduling.schedule import Schedule
from shared.scheduling.step_costs import StepCosts


class PendingDrafts:
    """A runner's table of ids after its first ``num_rows``; a draft in it has the id ``-1 - place``."""

    def __init__(self, last_ids: torch.Tensor, num_rows: int) -> None:
        self.drafts, self.num_rows = last_ids[num_rows:], num_rows

    def put(self, drawn: Sequence[torch.Tensor]) -> range:
        """Put the drafts of a step in the table, in place of the last step's; returns the id of each."""
        count = sum(map(len, drawn))
        assert count <= len(self.drafts), "or they would be written elsewhere"
        if drawn:  # else all have failed
            torch.cat(tuple(drawn), out=self.drafts[:count])
        return range(-1 - self.num_rows, -1 - self.num_rows - count, -1)


class Drafter(ABC):
    """Proposes tokens. The defaults suit a drafter on the host that reserves nothing and samples nothing.

    ``distributions`` has the probabilities ``[V]`` from which a draft was sampled, by its request's serial and the
    index of the output. Drafts that are not in it were certain. Rejection sampling needs them; it is one object, and
    changes.
    """

    distributions: Mapping[tuple[int, int], torch.Tensor] = MappingProxyType({})

    def join(
        self, pool: CachePoolProtocol, make_memory: MakeMemory, make_runner: MakeRunner, max_seq_len: int
    ) -> CachePoolProtocol:
        """The pool that the scheduler uses: ``pool``, the model's, or one that also reserves what the drafter needs."""
        return pool

    @abstractmethod
    def propose(self, schedule: Schedule) -> None:
        """Set ``draft_ids`` of each request of the schedule that has drafts; fewer than granted, or none, will do.

        It is called in every step. A schedule without drafts may have tokens in flight; its prompts are known.
        """

    def leave_drafts_in(self, pending: PendingDrafts) -> None:
        """From now on ``propose`` may leave drafts there, and does not wait for them."""

    def collect(self) -> None:
        """Wait for the drafts that ``propose`` has left on the device, and set ``draft_ids`` anew."""

    def observe(self, schedule: Schedule) -> None:
        """Set ``num_certain_drafts`` of the requests of a step that was committed: how many drafts after their newest
        token will be accepted, whatever the earlier ones were. The next schedules read the number.
        """

    @property
    def step_costs(self) -> StepCosts | None:
        """What forwards cost that make drafts, each one for each of its requests; None: drafts cost none."""
        return None

    def num_tokens(self, num_drafts: int) -> int:
        """The tokens of a request in a step that verifies so many of its drafts."""
        return num_drafts + 1


class NoDrafter(Drafter):
    """The drafter of an engine that does not speculate."""

    def propose(self, schedule: Schedule) -> None:
        """No request has drafts."""

    def num_tokens(self, num_drafts: int) -> int:
        """As many as without a drafter."""
        return 1
