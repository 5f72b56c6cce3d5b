"""Makes a pool with a prefix tree and its view from an engine's settings. Introduced in phase 8.

Invariant: that of :mod:`shared.cache.planned_memory`, which makes the memory if prefix caching is off.
"""

from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned_layout import planning
from shared.cache.planned_memory import planned_memory
from shared.cache.prefix import PrefixSharing
from shared.cache.prefix_view import PrefixView
from shared.cache.view import BatchView
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM


def prefix_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    if not config.is_on("use_prefix_caching"):
        return planned_memory(config, model, max_seq_len)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = PrefixView(model.config, sizes, model.dtype, model.device, config.attention_backend)
        return PagedKVCachePool.of(sizes, PrefixSharing(sizes.block_size), planning(view.planner)), view

    return make(sizes_for(config, model, max_seq_len, make))
