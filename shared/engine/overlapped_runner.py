"""Runs batches whose input ids are still on the device. Introduced in phase 9.

A step that is launched while the one before it runs begins with ids that the host does not know. So the runner keeps
the last id sampled for each sequence on the device, by the sequence's row in the pool, and the next step takes its
pending ids from there. The id is copied to the host too, for the text, but no step waits for that.
Behind these ids lie the drafts that a model has drawn for the step (phase 11).

Invariant: one stream runs everything in the order in which it was launched, so a step finds the ids of the one before.
"""

from collections.abc import Sequence
from typing import Any

import torch

from shared.cache.layout import Integers
from shared.cache.view import BatchView, StepInputs
from shared.engine.batch import Batch
from shared.engine.runner import Launched, Runner, cut
from shared.engine.sampler import Draws
from shared.kernels.pending_ids import fill_pending
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingRow


class OverlappedRunner(Runner):
    """A runner for steps of which the one before is in flight."""

    def __init__(self, model: CausalLM, view: BatchView, max_sequences: int, **sampling: Any) -> None:
        """``sampling``: the keyword arguments of :class:`Runner`."""
        super().__init__(model, view, max_sequences, **sampling)
        num_ids = max_sequences * (1 + self.most_drafts)
        self.last_ids = torch.zeros(num_ids, dtype=torch.int64, device=model.device)  # by the pool's row; then drafts

    @property
    def most_drafts(self) -> int:
        """The drafts that a drafter may leave on the device for each sequence."""
        return self.most_logit_rows - 1

    def _compute(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.has_pending:
            fill_pending(inputs.tokens.ids, self.last_ids)
        return super()._compute(batch, inputs)

    def _draw(self, launched: Launched, chosen: slice, rows: Sequence[SamplingRow], places: Integers) -> Draws:
        drawn = super()._draw(launched, chosen, rows, places)
        at = cut(launched.sequence_rows, chosen)
        self.last_ids.scatter_(0, at, drawn.ids)  # cheaper for the host than an assignment
        return drawn
