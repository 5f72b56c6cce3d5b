"""The inputs of a forward with mask tokens. Introduced in phase 11.1.

A request contributes its real tokens (the newest one, then guesses) and its groups of mask tokens
(:mod:`shared.tracks.multi_token.ops`). Mask tokens have no logit row: the model's head is not applied to them. They are
written to slots after the real tokens; these slots are freed when the step is committed.

Invariant: those of :class:`shared.engine.batch.Batch`, except that the positions of mask tokens repeat.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, Self, cast

import numpy as np

from shared.cache.layout.slots import Integers, Layout
from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.batch import Batch
from shared.scheduling.schedule import Schedule
from shared.tracks.multi_token.lora import FIRST_MASK
from shared.tracks.multi_token.ops import groups_and_ranks, positions
from shared.tracks.multi_token.scheduler import MultiTokenSchedule


@dataclass(frozen=True)
class MultiTokenBatch(Batch):
    """T new tokens of B sequences, some of them mask tokens."""

    num_masks: Integers = field(default_factory=lambda: np.zeros(0, np.int64), kw_only=True)
    """[B], k: mask tokens after each real token of a sequence; empty if no sequence has any."""

    @classmethod
    def of(cls, schedule: Schedule, pool: CachePoolProtocol) -> Self:
        """A group's mask tokens have ids from ``FIRST_MASK`` on."""
        if not isinstance(schedule, MultiTokenSchedule) or not schedule.masks:
            return super().of(schedule, pool)
        plain = super().of(schedule, cast(CachePoolProtocol, _WithMasks(schedule, pool)))
        num_masks = np.array([schedule.masks.get(request, 0) for request in schedule.requests], np.int64)
        shape = _shape(plain.num_new_tokens.tobytes(), num_masks.tobytes())
        ids = shape.mask_ids.copy()
        ids[shape.real_rows] = plain.token_ids
        prompt_rows = plain.prompt_rows
        if prompt_rows is not None:
            prompt_rows = replace(prompt_rows, rows=prompt_rows.rows + shape.shifts[prompt_rows.sequences])
        return replace(
            plain,
            token_ids=ids,
            pending=plain.pending + shape.shifts[plain.pending_sequences],
            positions=schedule.starts[shape.sequences] + shape.offsets,
            num_new_tokens=shape.num_new_tokens,
            logit_rows=plain.logit_rows + shape.shifts[plain.logit_sequences],
            prompt_rows=prompt_rows,
            num_masks=num_masks,
        )

    def mask_rows(self) -> dict[int, slice]:
        """The rows of each sequence's mask tokens, by the sequence's index; sequences without masks are absent."""
        ends = self.num_new_tokens.cumsum()
        with_masks = np.flatnonzero(self.num_masks)
        num_masks = self.num_new_tokens * self.num_masks // (1 + self.num_masks) if len(self.num_masks) else ends
        return {int(n): slice(int(ends[n] - num_masks[n]), int(ends[n])) for n in with_masks}

    def part(self, sequences: range) -> Self:
        part = super().part(sequences)
        return part if part is self else replace(part, num_masks=self.num_masks[sequences.start : sequences.stop])


class _Shape(NamedTuple):
    """Arrays that a batch with masks derives from its counts alone, which mostly equal the previous step's."""

    num_new_tokens: Integers  # [B], with masks
    shifts: Integers  # [B], mask tokens of the earlier sequences
    real_rows: Integers  # of the real tokens
    sequences: Integers  # [T], the index of each token's sequence
    offsets: Integers  # [T], its distance from its sequence's first new token
    mask_ids: Integers  # [T], 0 for real tokens


@lru_cache(maxsize=16)
def _shape(num_real: bytes, num_masks: bytes) -> _Shape:
    """The shape of sequences that have ``num_real`` tokens and ``num_masks`` masks after each of them, int64
    ``[B]``."""
    counts, masks = np.frombuffer(num_real, np.int64), np.frombuffer(num_masks, np.int64)
    sizes = list(zip(counts.tolist(), masks.tolist(), strict=True))
    ranks = np.concatenate([groups_and_ranks(*each)[1] for each in sizes])
    offsets = np.concatenate([positions(0, *each) for each in sizes])
    added = counts * masks
    sequences = np.arange(len(counts)).repeat(counts + added)
    mask_ids = np.where(ranks > 0, FIRST_MASK + ranks - 1, 0)
    return _Shape(counts + added, added.cumsum() - added, np.flatnonzero(ranks == 0), sequences, offsets, mask_ids)


class _WithMasks:
    """A pool whose layouts include a schedule's mask tokens."""

    def __init__(self, schedule: MultiTokenSchedule, pool: CachePoolProtocol) -> None:
        self.schedule, self.pool = schedule, pool

    def layout(self, schedule: Schedule) -> Layout:
        """The layout of the schedule's real tokens and mask tokens."""
        masks = self.schedule.masks
        entries = [
            entry._replace(num_tokens=entry.num_tokens * (1 + masks[entry.request]))
            if entry.request in masks
            else entry
            for entry in schedule
        ]
        return self.pool.layout(replace(schedule, entries=tuple(entries)))
