"""The ids of tokens in flight, which only the device knows. Introduced in phase 9.

A step that is launched while the previous one runs begins with ids that the host does not know. So the last id sampled
for each sequence stays on the device, at the sequence's row in the pool, and the next step reads its pending ids from
there. The id is also copied to the host, for the text, but no step waits for the copy. The drafts that a draft model
sampled for the step follow these ids (phase 11).

Invariant: one stream runs all launches in order, so a step finds the ids of the previous step.
"""

import torch

from shared.engine.batch import Batch
from shared.engine.executor.eager import Ids
from shared.kernels.sampling.pending_ids import fill_pending


class LastIds(Ids):
    """The last id of each sequence, followed by its drafts.

    Args:
        most_ids: the maximum number of ids per sequence: the last one, and drafts.
    """

    def __init__(self, max_sequences: int, most_ids: int, device: torch.device) -> None:
        self.tensor = torch.zeros(max_sequences * most_ids, dtype=torch.int64, device=device)

    def fill(self, batch: Batch, ids: torch.Tensor) -> None:
        """See :class:`Ids`."""
        if batch.has_pending:
            fill_pending(ids, self.tensor)

    def keep(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """See :class:`Ids`."""
        self.tensor.scatter_(0, rows, ids)  # cheaper for the host than an assignment
