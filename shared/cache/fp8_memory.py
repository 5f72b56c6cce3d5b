"""Makes a pool and its view, in 8 bits if the settings say so. Introduced in phase 10.

Invariant: that of :mod:`shared.cache.bucket_memory`, which makes the memory if the KV cache has the weights' dtype.
"""

from shared.cache.bucket_memory import bucket_memory, buckets_of
from shared.cache.fp8_view import Fp8View
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned import PlannedKVCachePool
from shared.cache.prefix import PrefixKVCachePool
from shared.cache.view import BatchView
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM


def fp8_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    if config.kv_cache_dtype == "auto":
        return bucket_memory(config, model, max_seq_len)
    buckets = buckets_of(config, model, max_seq_len)
    make_pool = PrefixKVCachePool if config.is_on("use_prefix_caching") else PlannedKVCachePool

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = Fp8View(model.config, sizes, model.dtype, model.device, config.attention_backend, buckets)
        return make_pool(sizes, view.planner), view

    return make(sizes_for(config, model, max_seq_len, make))
