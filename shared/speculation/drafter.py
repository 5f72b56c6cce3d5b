"""What proposes tokens for the model to verify: the interface of a drafter. Introduced in phase 11.

The scheduler grants drafts as counts; a drafter fills them with token ids. Invariants: a request has at most as many
drafts as its entry of the schedule grants; drafts follow the request's known tokens, so no token of it is in flight.
"""

from typing import Protocol

from shared.scheduling.schedule import Schedule


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, schedule: Schedule) -> None:
        """Set ``draft_ids`` of each request of the schedule that has drafts; fewer than granted, or none, will do."""
        ...
