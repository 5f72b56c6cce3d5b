"""Stores the hidden states of mask tokens for the drafter, and passes it the sampled tokens. Introduced in phase
11.1.

Invariants: the states are always those of the last launched batch; they are copies, so the next step may overwrite a
captured step's buffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shared.engine.batch import Batch
from shared.engine.runner import Launched
from shared.engine.sampling.sampler import SamplerOutput
from shared.sampling.sampler import SamplingRow
from shared.tracks.multi_token.batch import MultiTokenBatch


@dataclass(frozen=True)
class MaskStates:
    """The hidden states of a request's mask tokens in one step; ``start`` is the index of the step's first token of the
    request."""

    start: int
    hidden: Tensor  # [groups, k, H], before the final norm


Follow = Callable[[Launched, Sequence[SamplingRow], SamplerOutput], None]
"""Receives what a step samples, and from which rows, as soon as the step is launched."""


@dataclass
class MaskObserver:
    """Stores the states of the last step in ``states``, by request id; a :class:`shared.engine.runner.Observer`."""

    states: dict[str, MaskStates]
    follow: Follow

    def begin(self) -> None:
        self.states.clear()

    def computed(self, batch: Batch, hidden: Tensor) -> None:
        if not isinstance(batch, MultiTokenBatch):
            return
        starts = batch.num_new_tokens.cumsum() - batch.num_new_tokens
        for n, rows in batch.mask_rows().items():
            kept = hidden[rows].view(-1, int(batch.num_masks[n]), hidden.shape[1]).clone()
            self.states[batch.request_ids[n]] = MaskStates(int(batch.positions[starts[n]]), kept)

    def sampled(self, launched: Launched, rows: Sequence[SamplingRow], output: SamplerOutput) -> None:
        if self.states:
            self.follow(launched, rows, output)
