"""The schedule of a step: which tokens of which requests it computes. Introduced in phase 4.

Batch, commit, record and trace read these numbers and never derive them from a request's state. That state has moved on
by then: the next step may be scheduled, and tokens may be in flight. Invariants: a schedule holds a request at most
once; decoding requests precede prompts; an entry refers to the request object, so a later request that reuses its id is
not mistaken for it.

Most steps give the next token to the requests of the step before. Such steps form a *run*: what is the same in all of
them, from the requests' ids to the parameters of their rows, is found once (:class:`DecodeRun`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count, repeat
from typing import Any, NamedTuple, overload

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
_row: Callable[[tuple[Any, ...]], SamplingRow] = partial(tuple.__new__, SamplingRow)
_run_numbers = count()


class DecodeRun:
    """Consecutive steps that each compute the next token of the same requests, and what these steps share.

    A consumer that keeps something from step to step keeps ``number`` beside it, and so keeps no request alive.

    Args:
        last_step: the number of the last step in which no request has reached its maximum length.
    """

    def __init__(self, requests: list[Request], last_step: int) -> None:
        n = len(requests)
        self.requests, self.last_step = requests, last_step
        self.number = next(_run_numbers)
        self.starts: list[int] = []  # of the newest step
        self.step = 0  # its number
        self.request_ids = tuple([request.request_id for request in requests])
        self.ones, self.zeros = (1,) * n, (0,) * n
        self.num_tokens, self.numbers, self.no_ids = np.ones(n, np.int64), np.arange(n), np.zeros(n, np.int64)
        for array in (self.num_tokens, self.numbers, self.no_ids):
            array.flags.writeable = False
        self.rows: list[SamplingRow] = []  # of the step for which they were made first
        self.rows_start = 0  # that step's ``start``

    def is_in_flight(self, starts: Sequence[int]) -> bool:
        """Whether the ids of all tokens of the step that begins at ``starts`` are still on the device."""
        return [request.num_tokens for request in self.requests] == starts

    @cached_property
    def indices(self) -> Integers:
        """The index of each of ``rows``, ``[B]``."""
        return np.array([row.index for row in self.rows], np.int64)

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether one of ``rows`` has biases or penalties."""
        return any(row.adjusts_logits for row in self.rows)

    def sampling_rows(self, start: int) -> Sequence[SamplingRow]:
        """The rows of the step whose first request starts at ``start``.

        Rows that depend on more than their index are made anew: before ``min_tokens``, and with limits of thinking.
        """
        if not self.rows:
            rows = [request.sampling_row() for request in self.requests]
            if any(row.masked_ids or row.redirect for row in rows) or any(r.limit_row for r in self.requests):
                return rows
            self.rows, self.rows_start = rows, start
        return NextRows(self, start - self.rows_start)


class NextRows(Sequence[SamplingRow]):
    """The rows of a run, each ``num_after`` tokens later: a row is made when it is read."""

    def __init__(self, run: DecodeRun, num_after: int) -> None:
        self.run, self.num_after = run, num_after

    @overload
    def __getitem__(self, number: int) -> SamplingRow: ...
    @overload
    def __getitem__(self, number: slice) -> list[SamplingRow]: ...
    def __getitem__(self, number: int | slice) -> SamplingRow | list[SamplingRow]:
        found = self.run.rows[number]
        return self._later(found) if isinstance(found, SamplingRow) else [self._later(row) for row in found]

    def __iter__(self) -> Iterator[SamplingRow]:
        return map(self._later, self.run.rows)

    def __len__(self) -> int:
        return len(self.run.rows)

    def _later(self, row: SamplingRow) -> SamplingRow:
        return _row((*row[:2], row.index + self.num_after, *row[3:]))


@dataclass(frozen=True)
class Schedule:
    """A step, or a part of one.

    ``entries`` holds ``num_decoding`` decoding requests, then prompts: requests admitted for the first time or after a
    preemption. ``preempted`` holds the ids of the requests that were preempted for this step. ``num_ahead`` is how many
    further tokens each entry may compute, one at a time, without a new schedule (phase 11); memory for them is
    reserved. ``run`` is the run that the step belongs to, if any (phase 9).
    """

    step: int  # counted from 1
    entries: tuple[Scheduled, ...] = ()
    num_decoding: int = 0
    preempted: tuple[str, ...] = ()
    num_ahead: int = 0
    run: DecodeRun | None = field(default=None, init=False, compare=False)  # a schedule with other entries has none

    @classmethod
    def of_run(cls, step: int, run: DecodeRun, starts: Sequence[int]) -> "Schedule":
        """One token for each request, at ``starts``, followed by sampling; the columns come first, and the entries are
        made from them."""
        requests, ones, zeros = run.requests, run.ones, run.zeros
        columns = (requests, starts, ones, zeros, ones, zeros)
        schedule = cls(step, tuple(map(_entry, zip(*columns, strict=True))), len(requests))
        vars(schedule).update(
            run=run,
            requests=requests,
            starts=np.array(starts, np.int64),
            num_tokens=run.num_tokens,
            num_logit_rows=run.num_tokens,
            is_decode=True,
            columns=dict(zip(Scheduled._fields, columns, strict=True)),
        )
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

    def sampling_rows(self) -> Sequence[SamplingRow]:
        """The sampling parameters of each logit row. Reads token ids, so all earlier steps must be committed."""
        if self.run is not None:
            return self.run.sampling_rows(self.columns["start"][0])
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
