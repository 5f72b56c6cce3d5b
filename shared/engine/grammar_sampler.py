"""Samplers for rows that have a grammar: the mask comes first, then what the other samplers do. Introduced in phase 12.

Log-probabilities stay those of the raw logits.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from shared.engine.grammar_rows import Entered, GrammarRows
from shared.engine.graphs import RecordedDraw
from shared.engine.rejection_sampler import RejectionSampler
from shared.engine.sampler import Sampler
from shared.grammar.pool import GrammarPool
from shared.sampling.logit_mask import LogitMaskProcessor
from shared.sampling.sampler import SamplingBatch, SamplingRow

_ALLOWED = attrgetter("allowed")
_LOGPROBS = attrgetter("params.logprobs")
NUM_BEFORE, MOST_GRAPHS = 3, 256
"""How often a draw is launched before it is recorded, and how many are known; all are dropped when there are more."""


class GrammarSampler(Sampler):
    """As :class:`Sampler`, of the tokens that each row's grammar allows.

    Args:
        pool: the tables of the grammars whose masks the device computes; None: all masks come with the rows.
        captures: whether the launches of a draw that comes again are recorded and replayed; then the ids of a draw are
            overwritten by the next one.
    """

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        *,
        pool: GrammarPool | None = None,
        captures: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(device, max_rows, **more)
        self.grammar_rows = None if pool is None else GrammarRows(max_rows, pool, self.upload)
        self.captures = captures
        self.memory = torch.cuda.graph_pool_handle() if captures else None
        self.graphs: dict[tuple[Any, ...], RecordedDraw | int] = {}  # int: how often it was launched

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
        if not self.captures or asks or processor is not None or grammar_rows.has_drafts or not batch.is_simple:
            ids = self._launch(logits, rows, places, batch, entered)
        else:
            kind = (batch.temperature is None, batch.log_min_p is None, batch.top_k is None, batch.top_p is None)
            key = (logits.data_ptr(), *logits.shape, *logits.stride(), logits.dtype, len(entered.slots), *kind)
            if len(self.graphs) == MOST_GRAPHS:
                self.graphs.clear()
            known = self.graphs.get(key, 0)
            if known == NUM_BEFORE:
                known = RecordedDraw.of(lambda: self._launch(logits, rows, places, batch, entered), self.memory)
            if isinstance(known, RecordedDraw):
                ids = known.replay()
            else:
                known += 1
                ids = self._launch(logits, rows, places, batch, entered)
            self.graphs[key] = known
        grammar_rows.note_advance(entered)
        return ids

    def _launch(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        places: Sequence[int],
        batch: SamplingBatch,
        entered: Entered,
    ) -> torch.Tensor:
        """Remove what the masks refuse, draw, and move the rows on."""
        assert self.grammar_rows is not None
        self.grammar_rows.remove_refused(entered, logits)
        ids = super()._draw(logits, rows, places, batch)
        self.grammar_rows.advance(entered, ids)
        return ids


class GrammarRejectionSampler(GrammarSampler, RejectionSampler):
    """As :class:`RejectionSampler`: a draft that the grammar does not allow has the probability 0."""
