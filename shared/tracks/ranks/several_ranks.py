"""The ranks that compute a runner's batches, for several ranks. Introduced in phase 12.1.

Rank 0 sends each batch to the others before its own forward; all of them launch the same kernels and meet in the
collectives. Only rank 0 samples. The next step begins with a broadcast of the ids that only its device knows, so a step
can be launched while the previous one runs.

Invariants: every rank runs the same collectives in the same order, determined by the batch. A forward that raises is
not retried in parts: other ranks are still computing it, so its failure is the whole group's.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from shared.engine.batch import Batch
from shared.engine.executor.one_rank import Ranks
from shared.engine.sampling.sampler import Draws
from shared.tracks.ranks.batch import RankBatch
from shared.tracks.ranks.channel import Sender
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.vocabulary import Vocabulary
from shared.tracks.ranks.watch import Watch

R = TypeVar("R")


class SeveralRanks(Ranks):
    """The ranks of one model.

    Args:
        vocab_size: the whole model's vocabulary size.
        collectives: those between its ranks.
        sender, watch: rank 0's; None on another rank, which computes the batches that it receives.
        number: the model's number in messages: 0, or 1 for a draft model.
        is_whole: whether each rank has the whole model, so that there is nothing to gather.
    """

    can_repeat = False  # other ranks learn of a step only through a batch
    can_observe = False  # nor do they learn that rank 0 needs the hidden states of all tokens

    def __init__(
        self,
        vocab_size: int,
        collectives: Collectives,
        sender: Sender | None = None,
        watch: Watch | None = None,
        *,
        number: int = 0,
        is_whole: bool = False,
    ) -> None:
        self.collectives, self.sender, self.watch = collectives, sender, watch
        self.number, self.is_whole = number, is_whole
        self.vocabulary = Vocabulary(vocab_size, collectives)

    def run(self, run: Callable[[range], R], sequences: range) -> Iterator[tuple[range, R | Exception]]:
        """Raises RankError if a rank fails."""
        assert self.watch is not None
        self.watch.check()
        with uninterrupted():
            try:
                result = run(sequences)
            except Exception as error:
                raise self.watch.failed(error) from error
        yield sequences, result

    def begin(self, batch: Batch, last_ids: Tensor) -> None:
        if self.sender is not None:
            self.sender.send((self.number, batch))
        if len(batch.pending):
            self.collectives.broadcast(last_ids)

    def logits(self, batch: Batch, logits: Tensor) -> Tensor:
        """Ids ``[n, 1]`` if the batch needs only their arg-max."""
        if self.is_whole:
            return logits
        if len(logits) == 0:
            return logits.new_empty(0, self.vocabulary.size)
        if takes_argmax(batch):
            return self.vocabulary.argmax(logits)[:, None]
        return self.vocabulary.gather(logits)

    def gather(self, logits: Tensor) -> Tensor:
        return self.vocabulary.gather(logits)

    def sampled(self, batch: Batch, logits: Tensor) -> Draws | None:
        return Draws(logits[:, 0]) if takes_argmax(batch) else None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers SIGINT to the end of the context, so that all ranks complete a step that they have begun."""
    if threading.current_thread() is not threading.main_thread():  # only this thread is interrupted
        yield
        return
    received: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received and callable(before):
        before(*received[0])


def takes_argmax(batch: Batch) -> bool:
    """Whether a batch needs only the arg-max of each row."""
    return isinstance(batch, RankBatch) and batch.takes_argmax
