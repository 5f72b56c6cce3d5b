"""Samplers for rows that have a grammar: the mask comes first, then what the other samplers do. Introduced in phase 12.

Log-probabilities stay those of the raw logits.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from shared.engine.grammar_rows import GrammarRows
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
    """

    def __init__(self, device: torch.device, max_rows: int, *, pool: GrammarPool | None = None, **more: Any) -> None:
        super().__init__(device, max_rows, **more)
        self.grammar_rows = None if pool is None else GrammarRows(max_rows, pool, self.upload)

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], places: Sequence[int], batch: SamplingBatch
    ) -> torch.Tensor:
        processor = LogitMaskProcessor.of(list(map(_ALLOWED, rows)))
        if processor is not None:
            logits = processor.sent(self.upload)(logits)
        entered = None if self.grammar_rows is None else self.grammar_rows.enter(rows, places)
        if entered is None:
            return super()._draw(logits, rows, places, batch)
        assert self.grammar_rows is not None
        if list(map(_LOGPROBS, rows)).count(None) < len(rows):
            logits = logits.clone()
        self.grammar_rows.remove_refused(entered, logits)
        ids = super()._draw(logits, rows, places, batch)
        self.grammar_rows.advance(entered, ids)
        return ids


class GrammarRejectionSampler(GrammarSampler, RejectionSampler):
    """As :class:`RejectionSampler`: a draft that the grammar does not allow has the probability 0."""
