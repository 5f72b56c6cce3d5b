"""The inputs of one forward as arrays: token ids, positions, KV cache layout, logit rows. Introduced in phase 4.

A scheduler works on requests; a model works on a ragged batch of tokens laid end to end. ``Batch.of`` turns a schedule
into such a batch. The batch is self-contained: it holds arrays, ids and the pool's layout, but no request, so it can be
sent to another process. Invariants: the tokens of a sequence are contiguous and in order, and sequences follow the
order of ``request_ids``; positions are logical and come from the requests; slots are physical and come from the layout.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from shared.cache.layout.slots import Integers, Layout, ranges
from shared.cache.pool.interface import CachePoolProtocol
from shared.scheduling.schedule import Schedule


@dataclass(frozen=True)
class PromptRows:
    """m prompt tokens; for each, the log-probability of the next prompt token is computed."""

    rows: Integers  # [m], the tokens in the batch
    sequences: Integers  # [m], the index of each one's sequence
    next_ids: Integers  # [m], the tokens that follow
    num_top: Integers  # [m], how many most likely tokens to report for each

    @classmethod
    def of(cls, schedule: Schedule, begins: Integers) -> Self | None:
        """The prompt tokens of a schedule, whose entries begin at the tokens ``begins``; None if no request asks for
        any."""
        if not any(schedule.columns["num_prompt_logprobs"]):
            return None
        counts = np.array(schedule.columns["num_prompt_logprobs"], np.int64)
        next_ids = [
            token_id
            for request, start, *_, count in schedule
            for token_id in request.prompt_ids[start + 1 : start + 1 + count]
        ]
        num_top = np.array([request.params.prompt_logprobs or 0 for request in schedule.requests], np.int64)
        sequences = np.arange(len(schedule)).repeat(counts)
        return cls(ranges(begins, counts), sequences, np.array(next_ids, np.int64), num_top[sequences])

    def part(self, sequences: range, first_row: int) -> Self | None:
        """The part for a contiguous range of sequences, whose tokens begin at ``first_row``; None if there are none."""
        chosen = (self.sequences >= sequences.start) & (self.sequences < sequences.stop)
        if not chosen.any():
            return None
        rows, own = self.rows[chosen] - first_row, self.sequences[chosen] - sequences.start
        return type(self)(rows, own, self.next_ids[chosen], self.num_top[chosen])


@dataclass(frozen=True)
class Batch:
    """T new tokens of B sequences."""

    request_ids: tuple[str, ...]  # [B]
    token_ids: Integers  # [T], 0 for pending tokens; below 0: a draft that is still on the device
    pending: Integers  # [p], tokens whose ids are still on the device: the last token sampled for their sequence
    positions: Integers  # [T]
    num_new_tokens: Integers  # [B], at least 1 each; the sum is T
    logit_rows: Integers  # [n], the tokens whose logits are sampled from
    logit_sequences: Integers  # [n], the index of each logit row's sequence
    layout: Layout
    prompt_rows: PromptRows | None = None

    @classmethod
    def of(cls, schedule: Schedule, pool: CachePoolProtocol) -> Self:
        """The batch of a schedule, with the pool's layout. Raises CapacityError for tokens that were not reserved."""
        run = schedule.run
        if run is not None and run.is_in_flight(schedule.columns["start"]):
            tokens = run.no_ids, run.numbers, schedule.starts, run.num_tokens
            return cls(run.request_ids, *tokens, run.numbers, run.numbers, pool.layout(schedule))
        B, requests = len(schedule), schedule.requests
        # exercise 04x1: lay the requests' new tokens end to end
        # hint: an entry contributes its request's token_ids[start : start + num_tokens]; concatenate them
        # hint: a position is the token's index in its own request: start, start + 1, …, num_tokens of them
        # hint: ranges(first, counts) concatenates range(first[n], first[n] + counts[n])
        # hint: the last id may not be known yet (start + num_tokens > request.num_tokens): use 0 for it
        # hint: pending holds the index in the batch of each such token, which is the last of its sequence
        starts, num_new = schedule.starts, schedule.num_tokens
        ends, known = starts + num_new, np.array([request.num_tokens for request in requests], np.int64)
        positions, end_rows = ranges(starts, num_new), num_new.cumsum()
        if len(positions) == B and (ends >= known).all():  # the last token of each sequence, as in every decode step
            ids = np.array([request.last_token_id for request in requests], np.int64)
        else:
            ids = np.zeros(len(positions), np.int64)
            is_known = positions < known.repeat(num_new)
            packed = [request.packed_ids(start, start + count) for request, start, count, *_ in schedule]
            ids[is_known] = np.frombuffer(b"".join(packed), np.int64)
        pending = end_rows[ends > known] - 1
        ids[pending] = 0
        # end exercise
        if schedule.has_drafts:
            num_drafts = schedule.num_drafts
            ids[ranges(end_rows - num_drafts, num_drafts)] = [
                token_id for request, *_, count, _, _ in schedule for token_id in request.draft_ids[:count]
            ]
            pending = end_rows[ends > known + num_drafts] - 1
        num_logit_rows = schedule.num_logit_rows
        return cls(
            tuple([request.request_id for request in requests]),
            ids,
            pending,
            positions,
            num_new,
            ranges(end_rows - num_logit_rows, num_logit_rows),
            np.arange(B).repeat(num_logit_rows),
            pool.layout(schedule),
            PromptRows.of(schedule, end_rows - num_new),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def has_pending(self) -> bool:
        """Whether the id of a token, or of a draft, is still on the device
        (:mod:`shared.kernels.sampling.pending_ids`).
        """
        return len(self.pending) > 0 or bool((self.token_ids < 0).any())

    @property
    def pending_sequences(self) -> Integers:
        """The index of each pending token's sequence, ``[p]``."""
        return self.pending if self.is_decode else np.searchsorted(self.num_new_tokens.cumsum(), self.pending, "right")

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return len(self.token_ids) == len(self.request_ids)

    def part(self, sequences: range) -> Self:
        """The part of the batch with a contiguous range of its sequences."""
        if len(sequences) == len(self):
            return self
        ends = np.append(0, self.num_new_tokens.cumsum())
        begin, end = int(ends[sequences.start]), int(ends[sequences.stop])
        chosen, tokens = slice(sequences.start, sequences.stop), slice(begin, end)
        is_asked = (self.logit_sequences >= sequences.start) & (self.logit_sequences < sequences.stop)
        return type(self)(
            self.request_ids[chosen],
            self.token_ids[tokens],
            self.pending[(self.pending >= begin) & (self.pending < end)] - begin,
            self.positions[tokens],
            self.num_new_tokens[chosen],
            self.logit_rows[is_asked] - begin,
            self.logit_sequences[is_asked] - sequences.start,
            self.layout.part(chosen, tokens),
            self.prompt_rows and self.prompt_rows.part(sequences, begin),
        )

    def __len__(self) -> int:
        """B."""
        return len(self.request_ids)
