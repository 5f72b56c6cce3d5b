"""The inputs of a forward with mask tokens. Introduced in phase 11.1.

A request's part of the batch is its real tokens (its newest one, and guesses), then its groups of mask tokens
(:mod:`shared.ops.multi_token`). Mask tokens have no logit row: the model's head is not applied to them. They are
written to slots behind the real ones, which are given back when the step is committed.

Invariant: those of :class:`shared.engine.batch.Batch`, but for the positions of mask tokens, which repeat.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self, cast

import numpy as np

from shared.cache.layout import Integers, Layout
from shared.cache.pool import CachePoolProtocol
from shared.engine.batch import Batch
from shared.models.lora import FIRST_MASK
from shared.ops.multi_token import groups_and_ranks, positions
from shared.scheduling.multi_token import MultiTokenSchedule
from shared.scheduling.schedule import Schedule


@dataclass(frozen=True)
class MultiTokenBatch(Batch):
    """T new tokens of B sequences, some of them mask tokens."""

    num_masks: Integers = field(default_factory=lambda: np.zeros(0, np.int64), kw_only=True)
    """[B], k: mask tokens behind each real token of a sequence; empty if no sequence has any."""

    @classmethod
    def of(cls, schedule: Schedule, pool: CachePoolProtocol) -> Self:
        """See :class:`Batch`; the ids of the mask tokens of a group count from ``FIRST_MASK``."""
        if not isinstance(schedule, MultiTokenSchedule) or not schedule.masks:
            return super().of(schedule, pool)
        plain = super().of(schedule, cast(CachePoolProtocol, _WithMasks(schedule, pool)))
        num_masks = np.array([schedule.masks.get(request, 0) for request in schedule.requests], np.int64)
        added = num_masks * plain.num_new_tokens  # of each sequence
        shifts = added.cumsum() - added
        num_new = plain.num_new_tokens + added
        real = np.arange(plain.num_tokens) + shifts.repeat(plain.num_new_tokens)
        ids, places = np.zeros(int(num_new.sum()), np.int64), np.zeros(int(num_new.sum()), np.int64)
        ids[real], places[real] = plain.token_ids, plain.positions
        starts = num_new.cumsum() - num_new
        for n in np.flatnonzero(num_masks):
            start, num_real = int(starts[n]), int(plain.num_new_tokens[n])
            masks, offsets = _masks(num_real, int(num_masks[n]))
            own = slice(start + num_real, start + num_real + len(masks))
            ids[own], places[own] = masks, places[start] + offsets
        prompt_rows = plain.prompt_rows
        if prompt_rows is not None:
            prompt_rows = replace(prompt_rows, rows=prompt_rows.rows + shifts[prompt_rows.sequences])
        return replace(
            plain,
            token_ids=ids,
            pending=plain.pending + shifts[plain.pending_sequences],
            positions=places,
            num_new_tokens=num_new,
            logit_rows=plain.logit_rows + shifts[plain.logit_sequences],
            prompt_rows=prompt_rows,
            num_masks=num_masks,
        )

    def mask_rows(self) -> dict[int, slice]:
        """The rows of the mask tokens of each sequence that has some, by its index."""
        ends = self.num_new_tokens.cumsum()
        with_masks = np.flatnonzero(self.num_masks)
        num_masks = self.num_new_tokens * self.num_masks // (1 + self.num_masks) if len(self.num_masks) else ends
        return {int(n): slice(int(ends[n] - num_masks[n]), int(ends[n])) for n in with_masks}

    def part(self, sequences: range) -> Self:
        """See :class:`Batch`."""
        part = super().part(sequences)
        return part if part is self else replace(part, num_masks=self.num_masks[sequences.start : sequences.stop])


@lru_cache(maxsize=256)
def _masks(num_real: int, num_masks: int) -> tuple[Integers, Integers]:
    """The ids of the mask tokens behind ``num_real`` tokens, and their distances from the first of these."""
    ranks = groups_and_ranks(num_real, num_masks)[1][num_real:]
    return FIRST_MASK + ranks - 1, positions(0, num_real, num_masks)[num_real:]


class _WithMasks:
    """A pool whose layouts have room for the mask tokens of a schedule."""

    def __init__(self, schedule: MultiTokenSchedule, pool: CachePoolProtocol) -> None:
        self.schedule, self.pool = schedule, pool

    def layout(self, schedule: Schedule) -> Layout:
        """The layout of the schedule's tokens and mask tokens."""
        masks = self.schedule.masks
        entries = [
            entry._replace(num_tokens=entry.num_tokens * (1 + masks[entry.request]))
            if entry.request in masks
            else entry
            for entry in schedule
        ]
        return self.pool.layout(replace(schedule, entries=tuple(entries)))
