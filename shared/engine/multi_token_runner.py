"""Runners that keep the hidden states of mask tokens for the drafter. Introduced in phase 11.1.

Invariant: what is kept is a copy, so the next step may overwrite the buffers of a captured one.
"""

from dataclasses import dataclass
from typing import Any

import torch

from shared.cache.view import StepInputs
from shared.engine.batch import Batch
from shared.engine.captured_runner import CapturedRunner
from shared.engine.multi_token_batch import MultiTokenBatch
from shared.engine.overlapped_runner import OverlappedRunner
from shared.engine.runner import Runner


@dataclass(frozen=True)
class MaskStates:
    """The hidden states of a request's mask tokens in a step whose first token of the request has index ``start``."""

    start: int
    hidden: torch.Tensor  # [groups, k, H], before the final norm


class _KeepsStates(Runner):
    """Puts the states of each step in ``states``, by request id; its owner takes them out."""

    def __init__(self, *args: Any, states: dict[str, MaskStates] | None = None, **sampling: Any) -> None:
        """``args``, ``sampling``: those of the runner; ``states``: None if no drafter wants them."""
        self.states = states
        super().__init__(*args, **sampling)

    def _compute(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = super()._compute(batch, inputs)
        if self.states is not None and isinstance(batch, MultiTokenBatch):
            starts = batch.num_new_tokens.cumsum() - batch.num_new_tokens
            for n, rows in batch.mask_rows().items():
                kept = hidden[rows].view(-1, int(batch.num_masks[n]), hidden.shape[1]).clone()
                self.states[batch.request_ids[n]] = MaskStates(int(batch.positions[starts[n]]), kept)
        return hidden, logits


class MultiTokenRunner(_KeepsStates, OverlappedRunner):
    """See :class:`OverlappedRunner`."""


class CapturedMultiTokenRunner(_KeepsStates, CapturedRunner):
    """See :class:`CapturedRunner`."""
