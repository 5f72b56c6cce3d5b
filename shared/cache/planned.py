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
        layout = super().layout(schedule)
        return layout if self.planner is None else PlannedLayout.planned(layout, self.planner)
