"""Makes a pool and a view whose steps can be captured, from an engine's settings. Introduced in phase 9.

Invariant: that of :mod:`shared.cache.planned_memory`.
"""

from dataclasses import replace

from shared.cache.bucket_view import BucketView
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned_layout import planning
from shared.cache.prefix import PrefixSharing
from shared.cache.prefix_memory import prefix_memory
from shared.cache.view import BatchView
from shared.engine.buckets import Buckets
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.kernels.launch import launches
from shared.models.causal_lm import CausalLM


def bucket_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    buckets = buckets_of(config, model, max_seq_len)
    if not buckets.decode:
        return prefix_memory(config, model, max_seq_len)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = BucketView(model.config, sizes, model.dtype, model.device, config.attention_backend, buckets)
        sharing = PrefixSharing(sizes.block_size) if config.is_on("use_prefix_caching") else None
        return PagedKVCachePool.of(sizes, sharing, planning(view.planner)), view

    return make(sizes_for(config, model, max_seq_len, make))


def buckets_of(config: EngineConfig, model: CausalLM, max_seq_len: int) -> Buckets:
    """The buckets of captured steps; none if steps are not captured. Raises ConfigError if a CPU should."""
    if config.use_cuda_graphs and not launches(model.norm.weight):
        raise ConfigError("use_cuda_graphs is True and the device is cpu; CUDA graphs need a GPU: leave it out.")
    if not config.is_on("use_cuda_graphs") or not launches(model.norm.weight):
        return Buckets((), ())
    most_tokens = min(config.max_batch_size + config.prefill_chunk_size, config.most_tokens_of_a_step(max_seq_len))
    return replace(Buckets.of(config.max_batch_size, most_tokens), is_required=config.use_cuda_graphs is True)
