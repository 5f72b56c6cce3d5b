"""Samplers for rows that have a grammar: the mask comes first, then what the other samplers do. Introduced in phase 12.

Log-probabilities stay those of the raw logits.
"""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from shared.engine.grammar_rows import Entered, GrammarRows
from shared.engine.rejection_sampler import RejectionSampler
from shared.engine.sampler import Sampler
from shared.grammar.pool import GrammarPool
from shared.sampling.logit_mask import LogitMaskProcessor
from shared.sampling.sampler import SamplingBatch, SamplingRow

_ALLOWED = attrgetter("allowed")
_LOGPROBS = attrgetter("params.logprobs")


class GrammarSampler(Sampler):
    """As :class:`Sampler`, of the tokens that each row's grammar allows.

    Args:
        pool: the tables of the grammars whose masks the device computes; None: all masks come with the rows.

    Attributes:
        notes_draws: whether a draw changes more than memory of the device, so that it cannot be replayed.
    """

    notes_draws = False

    def __init__(self, device: torch.device, max_rows: int, *, pool: GrammarPool | None = None, **more: Any) -> None:
        super().__init__(device, max_rows, **more)
        self.grammar_rows = None if pool is None else GrammarRows(max_rows, pool, self.upload)

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], places: Sequence[int], batch: SamplingBatch
    ) -> torch.Tensor:
        processor = LogitMaskProcessor.of(list(map(_ALLOWED, rows)))
        if processor is not None:
            logits = processor.sent(self.upload)(logits)
        grammar_rows = self.grammar_rows
        entered = None if grammar_rows is None else grammar_rows.enter(rows, places)
        if grammar_rows is None or entered is None:
            return super()._draw(logits, rows, places, batch)
        asks = list(map(_LOGPROBS, rows)).count(None) < len(rows)
        if asks:
            logits = logits.clone()
        launch = partial(self._launch, logits, rows, places, batch, entered)
        if self.recorder is None or asks or processor is not None or grammar_rows.has_drafts or self.notes_draws:
            ids = launch()
        else:
            ids = self.recorder(logits, batch, launch, len(entered.slots))
        grammar_rows.advance(entered, ids)
        return ids

    def _launch(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        places: Sequence[int],
        batch: SamplingBatch,
        entered: Entered,
    ) -> torch.Tensor:
        """Remove what the masks refuse, and draw."""
        assert self.grammar_rows is not None
        self.grammar_rows.remove_refused(entered, logits)
        return super()._draw(logits, rows, places, batch)


class GrammarRejectionSampler(GrammarSampler, RejectionSampler):
    """As :class:`RejectionSampler`: a draft that the grammar does not allow has the probability 0."""
