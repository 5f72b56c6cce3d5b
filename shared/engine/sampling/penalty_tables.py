"""Which request each row of the token counts belongs to. Introduced in phase 4.

A request's row in the tables is its row in the KV cache pool, which passes to another request when it ends or is
preempted. No call signals this. Instead each row is tagged with its request and output count; on a mismatch the
request's tokens are entered again. So new requests, preempted requests, failed draws and repeated steps need no special
case.

A request with n drafts has n + 1 rows, each a copy of the previous row with one more draft. These copies are never
tagged, since their drafts may be wrong; the first row counts the accepted drafts in the next step.

Invariant: a tagged row counts exactly its request's prompt and the tagged number of outputs; a row has no tag while a
draw changes it.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from shared.sampling.sampler import SamplingBatch, SamplingRow
from shared.sampling.token_counts import TokenCounts

logger = logging.getLogger("infer.engine")


class PenaltyTables:
    """The token counts of up to ``num_rows`` requests, allocated when the first request with a penalty arrives.

    Args:
        upload: copies a tensor to the device without waiting.
    """

    def __init__(self, num_rows: int, device: torch.device, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.num_rows = num_rows
        self.device = device
        self.upload = upload
        self.counts: TokenCounts | None = None
        self.entered: dict[int, tuple[int, int]] = {}  # by row: the request's serial and its number of outputs

    def forget(self) -> None:
        """Make every request be entered again when it next samples."""
        self.entered.clear()

    def enter(self, rows: Sequence[SamplingRow], table_rows: Sequence[int], vocab_size: int) -> None:
        """Complete the token counts of the rows with a penalty; ``table_rows`` are the table rows of all rows."""
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
                # Forget the request's older rows: they may count as many outputs, some of them from a dropped step.
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
        """Count the tokens ``ids`` sampled for ``rows`` with ``batch``; the rows were entered."""
        if batch.counts is None:
            return
        assert batch.count_rows is not None
        batch.counts.add(batch.count_rows, ids[batch.penalised_rows])
        for row, table_row in zip(rows, table_rows, strict=True):
            if row.params.has_penalties and not row.num_drafts:
                self.entered[table_row] = row.serial, row.index + 1
