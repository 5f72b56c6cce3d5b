"""Makes a pool and its view, in 8 bits if the settings say so. Introduced in phase 10.

The scales are the checkpoint's, where it has them, and else 1, as in vLLM: e4m3 has an exponent of its own, so a scale
only moves its range, and keys and values of most models lie inside. On the demo model scales made from the largest
numbers of a text were no better than 1.

Invariant: that of :mod:`shared.cache.bucket_memory`, which makes the memory if the KV cache has the weights' dtype.
"""

from shared.cache.bucket_memory import bucket_memory, buckets_of
from shared.cache.fp8_view import Fp8View
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned_layout import planning
from shared.cache.prefix import PrefixSharing
from shared.cache.view import BatchView
from shared.engine.config import EngineConfig
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.kv_scales import kv_scales
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM


def fp8_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    if config.kv_cache_dtype == "auto":
        return bucket_memory(config, model, max_seq_len)
    buckets = buckets_of(config, model, max_seq_len)
    folder = resolve_model(config.model)
    scales = kv_scales(Checkpoint(folder), read_config(folder, can_quantize=True))
    if scales is not None:  # a rank has a part of the KV heads
        scales = scales.narrow(-1, model.config.first_kv_head, model.config.num_kv_heads)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = Fp8View(model.config, sizes, model.dtype, model.device, config.attention_backend, buckets, scales)
        sharing = PrefixSharing(sizes.block_size) if config.is_on("use_prefix_caching") else None
        return PagedKVCachePool.of(sizes, sharing, planning(view.planner)), view

    return make(sizes_for(config, model, max_seq_len, make))
