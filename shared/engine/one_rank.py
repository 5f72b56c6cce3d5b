"""The ranks that compute a runner's batches: one alone. Introduced in phase 4.

From phase 12.1 on several ranks may compute a batch together (:mod:`shared.parallel.several_ranks`): then what happens
before a forward, to its logits, and after a failure differs, and that is all.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch

from shared.engine.batch import Batch
from shared.engine.isolation import run_isolated
from shared.engine.sampler import Draws

R = TypeVar("R")


class Ranks(Protocol):
    """What a runner does for and with the ranks of its model."""

    can_repeat: bool  # whether a step can be moved on without a batch

    def run(self, run: Callable[[range], R], sequences: range) -> Iterator[tuple[range, R | Exception]]:
        """Run a forward of the sequences of a batch; as :func:`shared.engine.isolation.run_isolated`."""
        ...

    def begin(self, batch: Batch, last_ids: torch.Tensor) -> None:
        """A batch is computed next, with ids of ``last_ids`` if it has pending ones."""
        ...

    def logits(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        """What is sampled from: logits ``[n, V]``, of this rank's."""
        ...

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All logits ``[n, V]``, of this rank's."""
        ...

    def drawn(self, batch: Batch, logits: torch.Tensor) -> Draws | None:
        """The tokens, if :meth:`logits` has found them already."""
        ...


class OneRank:
    """There are no others; a request that fails is isolated."""

    can_repeat = True
    run = staticmethod(run_isolated)

    def begin(self, batch: Batch, last_ids: torch.Tensor) -> None:
        """See :class:`Ranks`."""

    def logits(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        """See :class:`Ranks`."""
        return logits

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """See :class:`Ranks`."""
        return logits

    def drawn(self, batch: Batch, logits: torch.Tensor) -> Draws | None:
        """See :class:`Ranks`."""
        return None
