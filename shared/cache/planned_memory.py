"""Makes a planned pool and its view from an engine's settings. Introduced in phase 6.1.

Invariant: the pool plans for the view's device, with the view's planner.
"""

from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned_layout import planning
from shared.cache.planned_view import PlannedView
from shared.cache.view import BatchView
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM


def planned_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = PlannedView(model.config, sizes, model.dtype, model.device, config.attention_backend)
        return PagedKVCachePool.of(sizes, None, planning(view.planner)), view

    return make(sizes_for(config, model, max_seq_len, make))
