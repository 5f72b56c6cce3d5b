"""Runs batches on all ranks of a group. Introduced in phase 12.1.

Rank 0 sends each batch to the others before its own forward; all compute the same launches, and meet in the
collectives. Sampling is rank 0's alone: the next step begins with a broadcast of the ids that only the devices know, so
a step can be launched while the one before it runs.

Invariants: every rank makes the same collectives in the same order, which a batch determines. A forward is not repeated
in parts if it raises: other ranks are in the middle of it, so its failure is the group's.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shared.cache.layout import Integers
from shared.cache.view import BatchView, StepInputs
from shared.engine.batch import Batch
from shared.engine.captured_runner import CapturedRunner
from shared.engine.overlapped_runner import OverlappedRunner
from shared.engine.runner import Launched, Runner
from shared.engine.sampler import Draws
from shared.models.causal_lm import CausalLM
from shared.parallel.batch import RankBatch
from shared.parallel.channel import Sender
from shared.parallel.collectives import Collectives
from shared.parallel.vocabulary import Vocabulary
from shared.parallel.watch import Watch
from shared.sampling.sampler import SamplingRow


class RankRunner(OverlappedRunner):
    """The runner of a rank.

    Args:
        ranks: the collectives.
        sender, watch: those of rank 0; None on another rank, whose batches come by :meth:`follow`.
        number: of the model, which messages name: 0, or 1 for a draft model.
        is_whole: whether each rank has all of the model, so that there is nothing to gather.
        sampling: the keyword arguments of :class:`shared.engine.runner.Runner`.
    """

    def __init__(
        self,
        model: CausalLM,
        view: BatchView,
        max_sequences: int,
        *,
        ranks: Collectives,
        sender: Sender | None = None,
        watch: Watch | None = None,
        number: int = 0,
        is_whole: bool = False,
        **sampling: Any,
    ) -> None:
        self.ranks, self.sender, self.watch, self.number, self.is_whole = ranks, sender, watch, number, is_whole
        self.vocabulary = Vocabulary(model.config.vocab_size, ranks)
        super().__init__(model, view, max_sequences, **sampling)

    def forward(self, batch: Batch) -> Launched:
        """See :class:`Runner`; raises RankError if a rank fails."""
        assert self.watch is not None
        self.watch.check()
        with uninterrupted():
            try:
                logits, rows, prompts = self._forward(batch)
            except Exception as error:
                raise self.watch.failed(error) from error
        return Launched(batch, logits, rows, {}, prompts)

    def repeat(self, launched: Launched) -> Launched | None:
        """See :class:`Runner`: other ranks know of no step but by a batch."""
        return None

    def follow(self, batch: Batch) -> None:
        """Compute this rank's part of a batch of rank 0."""
        self._forward(batch)

    def _compute(self, batch: Batch, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sender is not None:
            self.sender.send((self.number, batch))
        if len(batch.pending):
            self.ranks.broadcast(self.last_ids)
        hidden, logits = super()._compute(batch, inputs)
        if self.is_whole:
            return hidden, logits
        if len(logits) == 0:
            return hidden, self._no_logits()
        if takes_argmax(batch):
            return hidden, self.vocabulary.argmax(logits)[:, None]
        return hidden, self.vocabulary.gather(logits)

    def _draw(self, launched: Launched, chosen: slice, rows: Sequence[SamplingRow], places: Integers) -> Draws:
        if not takes_argmax(launched.batch):
            return super()._draw(launched, chosen, rows, places)
        drawn = Draws(launched.logits[chosen, 0])  # in the place of logits their arg-max: ids [n, 1]
        self.last_ids[launched.sequence_rows[chosen]] = drawn.ids
        return drawn

    def _prompt_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.gather(super()._prompt_logits(hidden))


class CapturedRankRunner(RankRunner, CapturedRunner):
    """The runner of a rank that replays captured steps, collectives included."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, SIGINT is put off to the end: a step that all ranks have begun is computed by all."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    received: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda *about: received.append(about))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received and callable(before):
        before(*received[0])


def takes_argmax(batch: Batch) -> bool:
    """Whether the arg-max of each row is all that a batch needs."""
    return isinstance(batch, RankBatch) and batch.takes_argmax


def rank_runner(runner: type[Runner]) -> type[RankRunner]:
    """The runner of a rank, of the kind of ``runner``."""
    return CapturedRankRunner if issubclass(runner, CapturedRunner) else RankRunner
