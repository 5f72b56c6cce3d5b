"""The step of the sampler that applies biases and penalties, with tables of the tokens that penalties count.
Introduced in phase 4.

A request's row in the tables is its row in the KV cache pool, which passes to another request when it ends or is
preempted. No call signals this. Instead each row is tagged with its request and output count; on a mismatch the
request's tokens are entered again. So new requests, preempted requests, failed draws and repeated steps need no special
case.

A request with n drafts has n + 1 rows, each a copy of the previous row with one more draft. These copies are never
tagged, since their drafts may be wrong; the first row counts the accepted drafts in the next step.

Invariant: a tagged row counts exactly its request's prompt and the tagged number of outputs; a row has no tag while a
draw changes it.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from shared.engine.executor.staging import Staging
from shared.engine.sampling.drawing import Edit
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow, adjust_logits
from shared.sampling.token_counts import TokenCounts
from shared.scheduling.schedule import NextRows

_STAGED = {
    "penalised_rows": np.int64,
    "count_rows": np.int64,
    "repetition_penalty": np.float32,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
}

logger = logging.getLogger("infer.engine")


class PenaltyTables:
    """Token counts for up to ``num_rows`` requests, allocated when the first request with a penalty arrives.

    Args:
        upload: copies a tensor to the device without waiting.
    """

    def __init__(self, num_rows: int, device: torch.device, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.num_rows = num_rows
        self.device = device
        self.upload = upload
        self.counts: TokenCounts | None = None
        self.staging = Staging(device, {name: (num_rows, dtype) for name, dtype in _STAGED.items()})
        self.last_rows: list[tuple[SamplingParams, Sequence[int]]] = []
        self.last: SamplingBatch | None = None  # of these rows
        self.entered: dict[int, tuple[int, int]] = {}  # by row: the request's serial and its number of outputs

    def __call__(self, rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Edit | None:
        """A :data:`shared.engine.sampling.drawing.Step`: biases, masked ids and penalties, applied to a copy of the
        logits."""
        adjusts = rows.run.adjusts_logits if isinstance(rows, NextRows) else any(row.adjusts_logits for row in rows)
        if not adjusts:
            return None
        batches: list[SamplingBatch] = []

        def apply(logits: torch.Tensor) -> torch.Tensor:
            batches.append(self._parameters(rows, table_rows, logits.shape[-1]))
            return adjust_logits(logits, batches[-1])

        return Edit(apply, follow=lambda ids: self.add(rows, table_rows, batches[-1], ids))

    def _parameters(self, rows: Sequence[SamplingRow], table_rows: Sequence[int], vocab_size: int) -> SamplingBatch:
        """The biases and penalties of the rows on the device."""
        constant = [(row.params, row.masked_ids) for row in rows]
        if self.last is not None and constant == self.last_rows:
            return self.last
        self.enter(rows, table_rows, vocab_size)
        batch = SamplingBatch.of_adjustments(rows, counts=self.counts, count_rows=table_rows)
        arrays = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        sent = {name: self.upload(array) for name, array in arrays.items() if name not in _STAGED}
        if batch.counts is not None:
            sent |= self.staging.send({name: array.numpy() for name, array in arrays.items() if name in _STAGED})
        batch = dataclasses.replace(batch, **sent)  # type: ignore[arg-type]
        self.last_rows, self.last = constant, batch if batch.counts is None else None  # counts change with every token
        return batch

    def forget(self) -> None:
        """Invalidate all rows, so that every request is entered again when it next samples."""
        self.entered.clear()

    def enter(self, rows: Sequence[SamplingRow], table_rows: Sequence[int], vocab_size: int) -> None:
        """Bring the token counts of the rows with a penalty up to date; ``table_rows`` are the table rows of all
        rows."""
        before: tuple[int, int, int] | None = None  # of the previous row: its request, number of drafts and table row
        for row, table_row in zip(rows, table_rows, strict=True):
            if not row.params.has_penalties:
                continue
            if self.counts is None:
                self.counts = TokenCounts(self.num_rows, vocab_size, self.device)
                logger.info("allocated %d bytes to count tokens for penalties", self.counts.num_bytes)
            serial, num_counted = self.entered.pop(table_row, (None, 0))
            if before is not None and before[:2] == (row.serial, row.num_drafts - 1):
                self.counts.copy(before[2], table_row)
                self._count(table_row, row.output_ids[-1:])
            elif serial == row.serial and num_counted <= row.index and not row.num_drafts:
                if num_counted < row.index:
                    self._count(table_row, row.output_ids[num_counted:])
            else:
                # Discard the request's older rows: they may have the same number of outputs, some of them from a
                # dropped step.
                self.entered = {other: state for other, state in self.entered.items() if state[0] != row.serial}
                prompt_ids, output_ids = (
                    self.upload(torch.tensor(ids, dtype=torch.int64)) for ids in (row.prompt_ids, row.output_ids)
                )
                self.counts.enter(table_row, prompt_ids, output_ids)
            before = row.serial, row.num_drafts, table_row

    def _count(self, table_row: int, output_ids: Sequence[int]) -> None:
        """Count further outputs in a row."""
        assert self.counts is not None
        rows, ids = self.upload(torch.tensor([[table_row] * len(output_ids), output_ids])).unbind()
        self.counts.add(rows, ids)

    def add(
        self, rows: Sequence[SamplingRow], table_rows: Sequence[int], batch: SamplingBatch, ids: torch.Tensor
    ) -> None:
        """Count the tokens ``ids`` that were sampled for ``rows`` with ``batch``, after the rows were entered."""
        if batch.counts is None:
            return
        assert batch.count_rows is not None
        batch.counts.add(batch.count_rows, ids[batch.penalised_rows])
        for row, table_row in zip(rows, table_rows, strict=True):
            if row.params.has_penalties and not row.num_drafts:
                self.entered[table_row] = row.serial, row.index + 1
