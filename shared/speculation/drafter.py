"""The interface of a drafter, which proposes tokens for the model to verify. Introduced in phase 11.

The scheduler grants numbers of drafts; a drafter supplies the token ids. Invariants: a request has at most as many
drafts as its entry of the schedule grants; drafts follow the request's known tokens, so no token of that request is in
flight.

A draft model's drafts stay on the device, where the verifying step reads them. So the host meanwhile prepares and
launches that step, and waits for the ids only to sample and to accept.
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
    """A runner's table of ids, after its first ``num_rows`` rows; the draft at ``index`` has the id ``-1 - index``."""

    def __init__(self, last_ids: torch.Tensor, num_rows: int) -> None:
        self.drafts, self.num_rows = last_ids[num_rows:], num_rows

    def put(self, drafts: Sequence[torch.Tensor]) -> range:
        """Put a step's drafts into the table, replacing the previous step's; returns the id of each."""
        count = sum(map(len, drafts))
        assert count <= len(self.drafts), "or they would be written elsewhere"
        if drafts:  # otherwise all of them failed
            torch.cat(tuple(drafts), out=self.drafts[:count])
        return range(-1 - self.num_rows, -1 - self.num_rows - count, -1)


class Drafter(ABC):
    """Proposes tokens. The defaults suit a drafter on the host that reserves nothing and samples nothing.

    ``distributions`` holds the probabilities ``[V]`` that each draft was sampled from (q), by its request's serial and
    output index. A missing key means that q is one-hot. Rejection sampling needs the mapping, which is mutated in
    place.
    """

    distributions: Mapping[tuple[int, int], torch.Tensor] = MappingProxyType({})

    def make_pool(
        self, model_pool: CachePoolProtocol, make_memory: MakeMemory, make_runner: MakeRunner, max_seq_len: int
    ) -> CachePoolProtocol:
        """The pool that the scheduler uses: the model's, or one that also reserves what the drafter needs."""
        return model_pool

    @abstractmethod
    def propose(self, schedule: Schedule) -> None:
        """Set ``draft_ids`` of each request of the schedule that has drafts; fewer than granted, or none, are allowed.

        Called in every step. A schedule without drafts may have tokens in flight; its prompts are known.
        """

    def leave_drafts_in(self, pending: PendingDrafts) -> None:
        """From now on ``propose`` may leave drafts on the device without waiting for them."""

    def collect(self) -> None:
        """Wait for the drafts that ``propose`` has left on the device, and set ``draft_ids`` to them."""

    def observe(self, schedule: Schedule) -> None:
        """Set ``num_certain_drafts`` for the requests of a committed step: how many drafts after their newest token are
        certain to be accepted. The next schedules read the number.
        """

    @property
    def step_costs(self) -> StepCosts | None:
        """The cost of the forwards that make one draft per request, for each draft; None: drafts cost nothing."""
        return None

    def num_tokens(self, num_drafts: int) -> int:
        """The number of tokens that a request has in a step that verifies this many of its drafts."""
        return num_drafts + 1


class NoDrafter(Drafter):
    """The drafter of an engine that does not speculate."""

    def propose(self, schedule: Schedule) -> None:
        """No request has drafts."""

    def num_tokens(self, num_drafts: int) -> int:
        """The same as without a drafter."""
        return 1
