"""Samples a token from each row of logits: steps edit the logits, then a single draw samples. Introduced in phase 4.

A sampler has a list of steps and one draw. A step edits the logits of a batch's rows: it masks what a grammar refuses
(phase 12), redirects a token (phase 11.1), or applies biases and penalties. The draw reads the edited logits. It
samples a token for each row, accepts or replaces drafts (phase 11), or samples drafts.

Invariant: launches that a recorder may replay (phase 9) depend only on the batch, the logits' address and the edits'
sizes; a draw launches everything else afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch

from shared.engine.executor.staging import upload
from shared.kernels.sampling.sampler import sample
from shared.sampling.sampler import SamplingBatch, SamplingRow

Recorder = Callable[[torch.Tensor, SamplingBatch, Callable[[], torch.Tensor], tuple[int | None, ...]], torch.Tensor]
"""Runs the launches of a draw, or replays them; also gets the logits, their parameters, and the sizes of all edits."""


def launch_draw(
    logits: torch.Tensor, batch: SamplingBatch, draw: Callable[[], torch.Tensor], sizes: tuple[int | None, ...]
) -> torch.Tensor:
    """A recorder that records nothing."""
    return draw()


def ignore_ids(ids: torch.Tensor) -> None:
    """``Edit.advance`` and ``Edit.follow`` of an edit that does not depend on earlier tokens."""


class Edit(NamedTuple):
    """A step's edit of one batch's logits.

    Attributes:
        apply: gets logits ``[n, V]`` and returns the edited ones.
        is_in_place: whether the edited logits are the same tensor rather than a copy.
        size: the number of rows, which determines the launches of ``apply`` and ``advance``; None: they cannot be
            replayed.
        advance: gets the sampled ids, int64 ``[n]``, and launches what follows from them; recorded with the draw.
        follow: gets the ids after each draw, whether it was launched or replayed, and after acceptance, which may
            replace those of rows with drafts.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    is_in_place: bool = False
    size: int | None = None
    advance: Callable[[torch.Tensor], None] = ignore_ids
    follow: Callable[[torch.Tensor], None] = ignore_ids


class Processor(Protocol):
    """A logits processor for some rows, made on the host."""

    def sent(self, upload: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """On the device of the logits."""
        ...

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, V]``, as a copy."""
        ...


def edit_by(processor: Processor | None) -> Edit | None:
    """The edit that uploads and applies a processor; None: nothing to do."""
    if processor is None:
        return None
    return Edit(lambda logits: processor.sent(partial(upload, device=logits.device))(logits))


Step = Callable[[Sequence[SamplingRow], Sequence[int]], Edit | None]
"""The edit of a batch, by its rows and their rows in the sampler's tables; None: it changes nothing."""


@dataclass(slots=True)
class Edited:
    """The logits ``[n, V]`` of a draw, and the edits to launch on them."""

    logits: torch.Tensor
    batch: SamplingBatch
    edits: Sequence[Edit]
    counters: torch.Tensor  # of the sampler's kernels
    recorder: Recorder

    def edit(self) -> torch.Tensor:
        """Launch the edits, and return the edited logits; called once, by the draw or by ``sample``."""
        for edit in self.edits:
            self.logits = edit.apply(self.logits)
        return self.logits

    def advance(self, ids: torch.Tensor) -> torch.Tensor:
        """Launch what follows the edits' draw, and return the ids; called once, by the draw or by ``sample``."""
        for edit in self.edits:
            edit.advance(ids)
        return ids

    def sample(self) -> torch.Tensor:
        """Launch or replay the edits, a token for each row, int64 ``[n]``, and what follows."""
        sizes = tuple([edit.size for edit in self.edits]) if self.edits else ()
        if None in sizes:
            return self._sample()
        return self.recorder(self.logits, self.batch, self._sample, sizes)

    def _sample(self) -> torch.Tensor:
        return self.advance(sample(self.edit(), self.batch, counters=self.counters))


Draw = Callable[[Edited, Sequence[SamplingRow]], torch.Tensor]
"""The tokens of all rows of a batch, int64 ``[n]``; ``Edited.logits`` are the edited ones afterwards."""


def plain(edited: Edited, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The draw that samples a token for each row."""
    return edited.sample()
