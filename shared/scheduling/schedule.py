"""The schedule of a step: which tokens of which requests it computes. Introduced in phase 4.

Batch, commit, record and trace read these numbers and never derive them from a request's state. That state has moved on
by then: the next step may be scheduled, and tokens may be in flight. Invariants: a schedule holds a request at most
once; decoding requests precede prompts; an entry refers to the request object, so a later request that reuses its id is
not mistaken for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.engine.request import Request
from shared.sampling.sampler import SamplingRow

Integers = NDArray[np.int64]


class Scheduled(NamedTuple):
    """One request's part of a step, which computes its tokens ``[start, start + num_tokens)``.

    The last ``num_drafts`` of them are draft tokens. The step samples a token from the logits of each of the last
    ``num_logit_rows``. It also computes the log-probabilities of the prompt tokens that follow the first
    ``num_prompt_logprobs``; only a few rows of those logits exist at a time.
    """

    request: Request
    start: int
    num_tokens: int
    num_drafts: int = 0
    num_logit_rows: int = 1
    num_prompt_logprobs: int = 0


_entry: Callable[[tuple[Any, ...]], Scheduled] = partial(tuple.__new__, Scheduled)  # as Scheduled._make, in C


@dataclass(frozen=True)
class Schedule:
    """A step, or a part of one.

    ``entries`` holds ``num_decoding`` decoding requests, then prompts: requests admitted for the first time or after a
    preemption. ``preempted`` holds the ids of the requests that were preempted for this step. ``num_ahead`` is how many
    further tokens each entry may compute, one at a time, without a new schedule (phase 11); memory for them is
    reserved.
    """

    step: int  # counted from 1
    entries: tuple[Scheduled, ...] = ()
    num_decoding: int = 0
    preempted: tuple[str, ...] = ()
    num_ahead: int = 0

    @classmethod
    def of_decoding(cls, step: int, requests: list[Request], starts: Sequence[int]) -> "Schedule":
        """One token for each request, at ``starts``, followed by sampling; the columns come first, and the entries are
        made from them."""
        ones, zeros = (1,) * len(requests), (0,) * len(requests)
        columns = (requests, starts, ones, zeros, ones, zeros)
        schedule = cls(step, tuple(map(_entry, zip(*columns, strict=True))), len(requests))
        known: dict[str, Any] = {"requests": requests, "starts": np.array(starts, np.int64), "is_decode": True}
        known |= dict.fromkeys(("num_tokens", "num_logit_rows"), np.ones(len(requests), np.int64))
        vars(schedule).update(known, columns=dict(zip(Scheduled._fields, columns, strict=True)))
        return schedule

    @cached_property
    def is_decode(self) -> bool:
        """Whether each entry computes one token and samples one."""
        tokens, logit_rows, n = self.columns["num_tokens"], self.columns["num_logit_rows"], len(self)
        return n == self.num_decoding and tokens.count(1) == n and logit_rows.count(1) == n

    @property
    def decoding(self) -> "Schedule":
        """The decode part: one token of each decoding request."""
        return Schedule(self.step, self.entries[: self.num_decoding], self.num_decoding, self.preempted)

    @property
    def prompts(self) -> "Schedule":
        """The prefill part."""
        return Schedule(self.step, self.entries[self.num_decoding :], 0, self.preempted)

    @cached_property
    def columns(self) -> Mapping[str, Sequence[Any]]:
        """Each field over all entries: a single pass over the entries fills every array."""
        columns = zip(*self.entries, strict=True) if self.entries else repeat(())
        return dict(zip(Scheduled._fields, columns, strict=False))

    @cached_property
    def requests(self) -> list[Request]:
        """The requests of the entries, in their order."""
        return list(self.columns["request"])

    @cached_property
    def starts(self) -> Integers:
        """``start`` of each entry, ``[B]``."""
        return np.array(self.columns["start"], np.int64)

    @cached_property
    def num_tokens(self) -> Integers:
        """``num_tokens`` of each entry, ``[B]``."""
        return np.array(self.columns["num_tokens"], np.int64)

    @cached_property
    def num_logit_rows(self) -> Integers:
        """``num_logit_rows`` of each entry, ``[B]``."""
        return np.array(self.columns["num_logit_rows"], np.int64)

    @cached_property
    def num_drafts(self) -> Integers:
        """``num_drafts`` of each entry, ``[B]``."""
        return np.array(self.columns["num_drafts"], np.int64)

    @property
    def has_drafts(self) -> bool:
        """Whether an entry has drafts."""
        return not self.is_decode and any(self.columns["num_drafts"])

    def sampling_rows(self) -> list[SamplingRow]:
        """The sampling parameters of each logit row. Reads token ids, so all earlier steps must be committed."""
        if self.is_decode or (self.num_logit_rows == 1).all():
            return [request.sampling_row() for request in self.requests]
        rows: list[SamplingRow] = []
        for request, _, _, num_drafts, num_logit_rows, _ in self.entries:
            draft_ids = [*request.draft_ids[:num_drafts], None]
            rows += [request.sampling_row(number, draft_ids[number]) for number in range(num_logit_rows)]
        return rows

    def __iter__(self) -> Iterator[Scheduled]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
