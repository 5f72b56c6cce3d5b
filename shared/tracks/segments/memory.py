"""Makes a pool and a view that support segments, from an engine's settings. Introduced in phase 9.1.

Segments need blocks, continuous batching and, on a GPU, planned attention. If any of these is missing, the memory is
phase 9's and the registry refuses segments. Invariant: that of :mod:`shared.cache.paged_memory`.
"""

from functools import partial

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.layout.paged import PagedSizes
from shared.cache.paged_memory import PagedMemory, sizes_for
from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import prefix_sharing
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.bucket_padding import bucket_attention, buckets_of, planned_in_buckets
from shared.cache.view.interface import BatchView
from shared.cache.view.paged import PagedView
from shared.engine.config import EngineConfig
from shared.kernels.launch import launches
from shared.models.causal_lm import CausalLM
from shared.tracks.segments.pool import segment_pool
from shared.tracks.segments.ranged_attention import RangedAttention
from shared.tracks.segments.registry import SegmentRegistry
from shared.tracks.segments.view import SegmentView

WITHOUT_SEGMENTS = PagedMemory(bucket_attention, prefix_sharing)


def segment_memory(
    config: EngineConfig, model: CausalLM, max_seq_len: int, registry: SegmentRegistry
) -> tuple[CachePoolProtocol, BatchView]:
    """See ``MakeMemory``; the pool joins ``registry`` if it can hold segments."""
    if config.kv_cache_backend == "contiguous":
        registry.refusal = "kv_cache_backend is 'contiguous', and segments are kept in blocks; leave it out."
        return contiguous_memory(config, model, max_seq_len)
    if config.batching_mode == "static":
        registry.refusal = "batching_mode is 'static', and segments need continuous batching; leave batching_mode out."
        return WITHOUT_SEGMENTS(config, model, max_seq_len)
    is_launching = launches(model.norm.weight)
    if is_launching and config.attention_backend not in (None, "planned"):
        registry.refusal = (
            f"attention_backend is {config.attention_backend!r}, and on a GPU segments need 'planned'; leave it out."
        )
        return WITHOUT_SEGMENTS(config, model, max_seq_len)
    buckets = buckets_of(config, model, max_seq_len)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        storage, shapes = PlainStorage.of(config, model, sizes), (model.config, sizes, model.dtype)
        make_pool = partial(segment_pool, sizes, registry, config.is_on("use_prefix_caching"))
        if not is_launching:
            return make_pool(), SegmentView(
                *shapes, storage, "naive" if config.attention_backend == "naive" else "sdpa"
            )
        ranged = RangedAttention(*planned_in_buckets(*shapes, storage, buckets), model.dtype)
        return make_pool(ranged.lay_out), PagedView(*shapes, storage, ranged, ranged)

    return make(sizes_for(config, model, max_seq_len, make))
