"""One forward's work as arrays: which tokens, of which sequences, where they go, which need logits. Introduced in
phase 4.

A scheduler thinks in requests, a model in tokens laid end to end. A batch is the second made from the first, and it is
complete: it holds arrays and ids, no request, and all that the pool had to say. So it can be sent to another process.
Invariants: the tokens of a sequence stand together and in order, in the order of ``request_ids``; positions
are the requests' own (logical), while the place of a token in memory is the layout's affair (physical).
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from shared.cache.layout import Integers, Layout, ranges
from shared.cache.pool import CachePoolProtocol
from shared.scheduling.schedule import Schedule


@dataclass(frozen=True)
class Batch:
    """T new tokens of B sequences."""

    request_ids: tuple[str, ...]  # B of them
    token_ids: Integers  # [T], 0 for those that are pending
    pending: Integers  # [p], tokens whose id is still on the device: the last that was sampled for their sequence
    positions: Integers  # [T]
    num_new_tokens: Integers  # [B], at least 1 each; they add up to T
    logit_rows: Integers  # [n], the tokens whose logits are asked for
    logit_sequences: Integers  # [n], the sequence of each of those, by its number
    layout: Layout

    @classmethod
    def of(cls, schedule: Schedule, pool: CachePoolProtocol) -> Self:
        """What the schedule computes, at the places that the pool has for it.

        Raises CapacityError for tokens that were not granted.
        """
        B, requests = len(schedule), schedule.requests
        # exercise 04x1: lay the requests' new tokens end to end
        # hint: an entry brings its request's token_ids[start : start + num_tokens]; concatenate those
        # hint: a position is an index in the token's own request: start, start + 1, …, num_tokens of them
        # hint: ranges(first, counts) counts on from each first number, and lays the results end to end
        # hint: the last id may not be known yet (start + num_tokens > request.num_tokens): put 0 in its place
        # hint: pending tells where: the number of that token in the batch, which is its sequence's last
        starts, num_new = schedule.starts, schedule.num_tokens
        ends, known = starts + num_new, np.array([request.num_tokens for request in requests], np.int64)
        positions, end_rows = ranges(starts, num_new), num_new.cumsum()
        if len(positions) == B and (ends >= known).all():  # each one's last token, as in every decode step
            ids = np.array([request.last_token_id for request in requests], np.int64)
        else:
            ids = np.zeros(len(positions), np.int64)
            token_ids = [entry.request.token_ids[entry.start : entry.start + entry.num_tokens] for entry in schedule]
            ids[positions < known.repeat(num_new)] = np.concatenate(token_ids)
        pending = end_rows[ends > known] - 1
        ids[pending] = 0
        # end exercise
        num_logit_rows = np.array([entry.num_logit_rows for entry in schedule], np.int64)
        return cls(
            tuple(request.request_id for request in requests),
            ids,
            pending,
            positions,
            num_new,
            ranges(end_rows - num_logit_rows, num_logit_rows),
            np.arange(B).repeat(num_logit_rows),
            pool.layout(schedule),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence brings one token."""
        return self.num_tokens == len(self)

    def part(self, sequences: range) -> Self:
        """The batch of some neighbouring sequences."""
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
        )

    def __len__(self) -> int:
        """B."""
        return len(self.request_ids)
