"""What one step does, said once: which tokens of which requests. Introduced in phase 4.

Batch, commit, record and trace read these numbers and never derive them again from a request's state, which has moved
on by then: a step later may have been scheduled, and tokens may be in flight. Invariants: a request stands in a
schedule once; decoding requests stand before prompts; an entry holds the request itself, so it is never taken for a
later request that uses the same id.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.engine.request import Request
from shared.sampling.sampler import SamplingRow

Integers = NDArray[np.int64]


class Scheduled(NamedTuple):
    """One request's part of a step: its tokens from index ``start`` on are computed, ``num_tokens`` of them.

    The last ``num_drafts`` of them are guesses; logits are wanted of the last ``num_logit_rows``.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int = 0
    num_logit_rows: int = 1


@dataclass(frozen=True)
class Schedule:
    """A step, or a part of one.

    ``entries`` are of ``num_decoding`` decoding requests, then of prompts: requests that were admitted, or admitted
    again, and have tokens that were never computed. ``preempted`` names the requests that lost their memory to others.
    """

    step: int  # counted from 1
    entries: tuple[Scheduled, ...] = ()
    num_decoding: int = 0
    preempted: tuple[str, ...] = ()

    @property
    def decoding(self) -> "Schedule":
        """The part that computes one token of each decoding request."""
        return Schedule(self.step, self.entries[: self.num_decoding], self.num_decoding, self.preempted)

    @property
    def prompts(self) -> "Schedule":
        """The part that computes prompts."""
        return Schedule(self.step, self.entries[self.num_decoding :], 0, self.preempted)

    @property
    def requests(self) -> list[Request]:
        """Of the entries."""
        return [entry.request for entry in self.entries]

    @property
    def starts(self) -> Integers:
        """``[B]``, of the entries."""
        return np.array([entry.start for entry in self.entries], np.int64)

    @property
    def num_tokens(self) -> Integers:
        """``[B]``, of the entries."""
        return np.array([entry.num_tokens for entry in self.entries], np.int64)

    def sampling_rows(self) -> list[SamplingRow]:
        """How the token behind each logit row is chosen; reads tokens, so all of earlier steps must have arrived."""
        return [entry.request.sampling_row() for entry in self.entries for _ in range(entry.num_logit_rows)]

    def __iter__(self) -> Iterator[Scheduled]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
