"""Makes a pool and a view for steps with mask tokens. Introduced in phase 11.1.

Invariant: that of :mod:`shared.cache.fp8_memory`, which makes the memory of an engine without an adapter.
"""

from shared.cache.bucket_memory import buckets_of
from shared.cache.fp8_memory import fp8_memory
from shared.cache.multi_token_view import MultiTokenView
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned_layout import planning
from shared.cache.prefix import PrefixSharing
from shared.cache.view import BatchView
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM


def multi_token_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    if config.adapter is None:
        return fp8_memory(config, model, max_seq_len)
    buckets = buckets_of(config, model, max_seq_len)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = MultiTokenView(model.config, sizes, model.dtype, model.device, config.attention_backend, buckets)
        sharing = PrefixSharing(sizes.block_size) if config.is_on("use_prefix_caching") else None
        return PagedKVCachePool.of(sizes, sharing, planning(view.planner)), view

    return make(sizes_for(config, model, max_seq_len, make))
