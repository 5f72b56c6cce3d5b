"""What one step does, said once: which tokens of which requests. Introduced in phase 4.

Batch, commit, record and trace read these numbers and never derive them again from a request's state, which has moved
on by then: a step later may have been scheduled, and tokens may be in flight. Invariants: a request stands in a
schedule once; decoding requests stand before prompts; an entry holds the request itself, so it is never taken for a
later request that uses the same id.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from shared.engine.request import Request
from shared.sampling.sampler import SamplingRow


class Scheduled(NamedTuple):
    """One request's part of a step: its tokens from index ``start`` on are computed, ``num_tokens`` of them.

    The last ``num_drafts`` of them are guesses; logits are wanted of the last ``num_logit_rows``.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int = 0
    num_logit_rows: int = 1

    @property
    def is_prefill(self) -> bool:
        """Whether tokens of a prompt are computed, or tokens that were known before, after a preemption."""
        return self.start < len(self.request.prompt_ids) or self.num_tokens - self.num_drafts > 1


@dataclass(frozen=True)
class Schedule:
    """A step, or a part of one. ``preempted`` names the requests that lost their memory to others in it."""

    step: int  # counted from 1
    entries: tuple[Scheduled, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def decoding(self) -> Self:
        """The part that computes one token of each decoding request."""
        return replace(self, entries=tuple(entry for entry in self.entries if not entry.is_prefill))

    @property
    def prompts(self) -> Self:
        """The part that computes prompts."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.is_prefill))

    def sampling_rows(self) -> list[SamplingRow]:
        """How the token behind each logit row is chosen; reads tokens, so all of earlier steps must have arrived."""
        return [entry.request.sampling_row() for entry in self.entries for _ in range(entry.num_logit_rows)]

    def __iter__(self) -> Iterator[Scheduled]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
