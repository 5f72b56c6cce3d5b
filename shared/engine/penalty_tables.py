"""Which request each row of the token counts belongs to. Introduced in phase 4.

A request's row in the tables is its row in the KV cache pool, which another request takes over when it ends or is
preempted. Nothing tells the tables so. Instead a row remembers the request and the number of outputs that it counts; if
these are not those of the request that samples next, its tokens are entered anew. So a new request, a preempted one, a
draw that raised, and a step that was interrupted after its draw and is repeated, need no case of their own.

Invariant: a row that is remembered counts exactly the prompt and the first outputs of its request; while a draw changes
a row, the row is forgotten.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from shared.sampling.sampler import SamplingBatch, SamplingRow
from shared.sampling.token_counts import TokenCounts

logger = logging.getLogger("infer.engine")


class PenaltyTables:
    """The token counts of up to ``num_rows`` requests, allocated for the first request with a penalty.

    Args:
        upload: copies a tensor to the device without waiting.
    """

    def __init__(self, num_rows: int, device: torch.device, upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.num_rows = num_rows
        self.device = device
        self.upload = upload
        self.counts: TokenCounts | None = None
        self.entered: dict[int, tuple[int, int]] = {}  # by row: the request's serial and its number of outputs

    def enter(self, rows: Sequence[SamplingRow], places: Sequence[int], vocab_size: int) -> None:
        """Make the counts of the rows with a penalty complete; ``places`` are the table rows of all rows."""
        for row, place in zip(rows, places, strict=True):
            if not row.params.has_penalties:
                continue
            if self.counts is None:
                self.counts = TokenCounts(self.num_rows, vocab_size, self.device)
                logger.info("allocated %d bytes to count tokens for penalties", self.counts.num_bytes)
            if self.entered.pop(place, None) != (row.serial, row.index):
                # Forget the request's older rows: they may count as many outputs, some of them from a dropped step.
                self.entered = {other: state for other, state in self.entered.items() if state[0] != row.serial}
                prompt_ids, output_ids = (
                    self.upload(torch.tensor(ids, dtype=torch.int64)) for ids in (row.prompt_ids, row.output_ids)
                )
                self.counts.enter(place, prompt_ids, output_ids)

    def add(self, rows: Sequence[SamplingRow], places: Sequence[int], batch: SamplingBatch, ids: torch.Tensor) -> None:
        """Count the tokens ``ids`` drawn for ``rows`` with ``batch``; the rows were entered."""
        if batch.counts is None:
            return
        assert batch.count_rows is not None
        batch.counts.add(batch.count_rows, ids[batch.penalised_rows])
        for row, place in zip(rows, places, strict=True):
            if row.params.has_penalties:
                self.entered[place] = row.serial, row.index + 1
