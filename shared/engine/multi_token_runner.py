"""Runners that give the drafter the hidden states of mask tokens, and then what was drawn. Introduced in phase 11.1.

Invariants: the states are those of the last batch that was launched, and of no other; what is kept is a copy, so the
next step may overwrite the buffers of a captured one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.cache.view import StepInputs
from shared.engine.batch import Batch
from shared.engine.captured_runner import CapturedRunner
from shared.engine.multi_token_batch import MultiTokenBatch
from shared.engine.overlapped_runner import OverlappedRunner
from shared.engine.runner import Launched, Runner
from shared.engine.sampler import SamplerOutput
from shared.sampling.sampler import SamplingRow


@dataclass(frozen=True)
class MaskStates:
    """The hidden states of a request's mask tokens in a step whose first token of the request has index ``start``."""

    start: int
    hidden: torch.Tensor  # [groups, k, H], before the final norm


Follow = Callable[[Launched, Sequence[SamplingRow], SamplerOutput], None]
"""Gets what a step has drawn, and from which rows, as soon as it is launched."""


class _KeepsStates(Runner):
    """Keeps the states of the last step in ``states``, by request id."""

    def __init__(
        self,
        *args: Any,
        states: dict[str, MaskStates] | None = None,
        follow: Follow | None = None,
        **sampling: Any,
    ) -> None:
        """``args``, ``sampling``: those of the runner; ``states``, ``follow``: None if no drafter wants them."""
        self.states, self.follow = states, follow
        super().__init__(*args, **sampling)

    @property
    def most_drafts(self) -> int:
        """Those behind each of a sequence's logit rows."""
        return self.most_logit_rows * (self.most_logit_rows - 1)

    def forward(self, batch: Batch) -> Launched:
        """See :class:`Runner`."""
        if self.states is not None:
            self.states.clear()
        return super().forward(batch)

    def sample(self, launched: Launched, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """See :class:`Runner`."""
        sampled = super().sample(launched, rows)
        if self.states and self.follow is not None:
            self.follow(launched, rows, sampled)
        return sampled

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
