"""A paged KV cache pool whose layouts carry attention plans. Introduced in phase 6.1.

Invariants: those of :class:`shared.cache.paged.PagedKVCachePool`.
"""

from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.planned_layout import AttentionPlanner, PlannedLayout
from shared.scheduling.schedule import Schedule


class PlannedKVCachePool(PagedKVCachePool):
    """A paged pool that plans the attention of its layouts if it has a planner."""

    def __init__(self, sizes: PagedSizes, planner: AttentionPlanner | None) -> None:
        super().__init__(sizes.num_blocks, sizes.block_size, sizes.max_sequences, sizes.max_seq_len)
        self.planner = planner

    def layout(self, schedule: Schedule) -> PagedLayout:
        """See ``CachePoolProtocol``."""
        layout, planner = super().layout(schedule), self._planner()
        return layout if planner is None else PlannedLayout.planned(layout, planner)

    def _planner(self) -> AttentionPlanner | None:
        """The planner of the step that is laid out; None: it needs no plans."""
        return self.planner
