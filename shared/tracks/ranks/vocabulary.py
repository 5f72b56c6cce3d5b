"""Logits whose columns are divided among ranks: gathered, or only their arg-max. Introduced in phase 12.1.

Rank r has the logits of its own part of the vocabulary. Sampling gathers all of them, V numbers per row. The arg-max
needs only two numbers from each rank.

Invariant: ties go to the smallest id, as in ``torch.argmax`` of all logits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.launch import launches
from shared.kernels.sampling.sampler import sample
from shared.sampling.sampler import SamplingBatch
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.shard import Shard


class Vocabulary:
    """The ranks' parts of ``size`` tokens."""

    def __init__(self, size: int, ranks: Collectives) -> None:
        self.size, self.ranks = size, ranks
        self.parts = [Shard(rank, ranks.size).part(size) for rank in range(ranks.size)]
        self.width = len(self.parts[0])  # the first part is the largest

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's logits ``[n, part]`` to the complete ``[n, V]``; smaller parts are padded for the exchange."""
        padded = F.pad(logits, (0, self.width - logits.shape[1]))
        gathered = self.ranks.gathered(padded)  # [N, n, width]
        if self.width * self.ranks.size == self.size:
            return gathered.transpose(0, 1).flatten(1)
        return torch.cat([piece[:, : len(part)] for piece, part in zip(gathered, self.parts, strict=True)], dim=1)

    def argmax(self, logits: Tensor) -> Tensor:
        """The ids of the largest logits: this rank's ``[n, part]`` to int64 ``[n]``."""
        # exercise 12.1x3: the arg-max over shards
        # hint: largest(logits) gives value and index of each row in this rank's part; its ids begin at part.start
        # hint: gather value and id together, as float64 [2, n], which holds both exactly: [N, 2, n] of all ranks
        # hint: the winner of a row is the rank of the largest value; gather(0, winners) picks its id
        # hint: argmax over dim 0 takes the first of equal values: the smallest rank, so the smallest id
        values, ids = largest(logits)
        ids = ids + self.parts[self.ranks.rank].start
        values, ids = self.ranks.gathered(torch.stack((values.double(), ids.double()))).unbind(1)  # [N, n] each
        winners = values.argmax(0, keepdim=True)
        return ids.gather(0, winners)[0].long()
        # end exercise


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row of ``[n, V]``, and the first column that has it; on a GPU by the sampler's
    kernel."""
    if not launches(logits):
        values, columns = logits.max(-1)
        return values, columns
    columns = sample(logits, SamplingBatch(len(logits)))
    return logits.gather(1, columns[:, None])[:, 0], columns
