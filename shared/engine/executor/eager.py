"""What computes a loaded batch: one launch after the other. Introduced in phase 4.

From phase 9 on an executor may replay captured steps instead (:mod:`shared.engine.executor.captured`), and a step
may begin with ids that only the device knows (:mod:`shared.engine.executor.last_ids`). Here every id is known.

Invariant: an executor changes neither the batch nor a request.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from shared.cache.view.interface import BatchView, StepInputs
from shared.engine.batch import Batch
from shared.engine.sampling.drawing import Recorder, launch_draw
from shared.models.causal_lm import CausalLM


class Ids:
    """The ids of tokens that the host does not know yet. Here there are none, since a step begins only once the
    previous step's tokens are known.

    Attributes:
        tensor: int64, on the device; it begins with the sequences' ids, indexed by the pool's row.
    """

    def __init__(self, max_sequences: int, most_ids: int, device: torch.device) -> None:
        self.tensor = torch.zeros(0, dtype=torch.int64, device=device)

    def fill(self, batch: Batch, ids: torch.Tensor) -> None:
        """Fill in, in place, the ids of a batch's tokens that the host does not know."""

    def keep(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Store the ids sampled for the sequences in these rows of the pool."""


class Executor(Protocol):
    """Computes batches that have been loaded into its view."""

    recorder: Recorder  # the sampler may be given its logits
    num_replays: int

    def __call__(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[T, H]`` or more, and logits ``[n, V]``. Unless the executor was made for all hidden states,
        or the batch has prompt rows, they may be those of fewer tokens, and must not be read."""
        ...

    def repeat(self, num_sequences: int) -> torch.Tensor | None:
        """Logits ``[n, V]`` for the tokens just sampled in a decode step, which must be the last step computed.

        None if the step cannot be advanced without the host.
        """
        ...


MakeExecutor = Callable[[CausalLM, BatchView, Ids, int | None], Executor]
"""Makes an executor; the arguments are those of :class:`Eager`."""


class Eager:
    """Launches each operation of a step.

    Args:
        most_logit_rows: maximum logit rows of a sequence, if nothing but them and scored prompts reads hidden states;
            None: all hidden states are read.
    """

    num_replays = 0

    def __init__(self, model: CausalLM, view: BatchView, last_ids: Ids, most_logit_rows: int | None = None) -> None:
        self.model, self.view, self.last_ids, self.most_logit_rows = model, view, last_ids, most_logit_rows
        self.recorder: Recorder = launch_draw
        self.first_row = torch.zeros(1, dtype=torch.int64, device=model.device)

    def __call__(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Executor`."""
        self.last_ids.fill(batch, inputs.tokens.ids)
        n = len(batch.logit_rows)
        if self.most_logit_rows is None or batch.prompt_rows is not None or n == batch.num_tokens:
            hidden = self.model(inputs.tokens, self.view)
            return hidden, logits_of(self.model, batch, inputs, hidden)
        hidden = self.model(inputs.tokens, self.view, inputs.logit_rows[:n] if n else self.first_row)
        return hidden, self.model.logits(hidden) if n else no_logits(self.model)

    def repeat(self, num_sequences: int) -> torch.Tensor | None:
        """See :class:`Executor`."""
        return None


def logits_of(model: CausalLM, batch: Batch, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, V]`` of the batch's logit rows, from the hidden states of its tokens."""
    n = len(batch.logit_rows)
    if n == 0:  # the prompts are not complete yet, or the requests generate nothing
        return no_logits(model)
    return model.logits(hidden[:n] if n == batch.num_tokens else hidden[inputs.logit_rows[:n]])


def no_logits(model: CausalLM) -> torch.Tensor:
    """Logits ``[0, V]``."""
    return torch.empty(0, model.config.vocab_size, dtype=model.dtype, device=model.device)
