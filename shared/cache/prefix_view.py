"""The model's view of a paged KV cache with shared prefixes. Introduced in phase 8.

Attention reads shared blocks as any others: sharing is a matter of block tables. What is new on the device is the copy
of a block before a step that writes into it. Invariants: those of :class:`shared.cache.planned_view.PlannedView`; all
copies of a step precede its writes.
"""

from typing import cast

from shared.cache.paged_layout import PagedLayout
from shared.cache.planned_view import PlannedView
from shared.cache.view import StepInputs
from shared.engine.batch import Batch


class PrefixView(PlannedView):
    """Keys and values in blocks, some of which are copied before a step; see ``BatchView``."""

    def load(self, batch: Batch) -> StepInputs:
        """See ``BatchView``."""
        for source, target in cast(PagedLayout, batch.layout).copies.tolist():
            self.keys[:, target] = self.keys[:, source]  # all layers
            self.values[:, target] = self.values[:, source]
        return super().load(batch)
