"""The ranks that compute a runner's batches, for a single rank. Introduced in phase 4.

From phase 12.1 on, several ranks may compute a batch together (:mod:`shared.tracks.ranks.several_ranks`). The two
differ only in the work before a forward, on its logits, and after a failure.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from shared.engine.batch import Batch
from shared.engine.executor.isolation import run_isolated
from shared.engine.sampling.sampler import Draws

R = TypeVar("R")


class Ranks:
    """The steps of a runner that involve its model's other ranks; here there are none."""

    can_repeat = True  # whether a step can be advanced without a new batch
    can_observe = True  # whether a runner may have observers, which need the hidden states of all tokens

    def run(self, run: Callable[[range], R], sequences: range) -> Iterator[tuple[range, R | Exception]]:
        """Run a forward of the sequences of a batch; see :func:`shared.engine.executor.isolation.run_isolated`."""
        return run_isolated(run, sequences)

    def begin(self, batch: Batch, last_ids: torch.Tensor) -> None:
        """Prepares to compute a batch, with ids from ``last_ids`` if it has pending ones."""

    def logits(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        """The logits ``[n, V]`` to sample from, given this rank's."""
        return logits

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All logits ``[n, V]``, given this rank's."""
        return logits

    def sampled(self, batch: Batch, logits: torch.Tensor) -> Draws | None:
        """The tokens, if :meth:`logits` has already found them."""
        return None
