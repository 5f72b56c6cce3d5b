"""Makes a pool and a view that hold chunks, from an engine's settings. Introduced in phase 9.1.

Chunks need blocks, continuous batching, and on a GPU planned attention. Where they cannot be had, the memory is that of
phase 9 and the registry refuses chunks. Invariant: that of :mod:`shared.cache.planned_memory`.
"""

from shared.cache.bucket_memory import bucket_memory, buckets_of
from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedLayout, PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.planned_layout import planning
from shared.cache.pool import CachePoolProtocol
from shared.cache.view import BatchView
from shared.chunks.layout import ChunkLayout
from shared.chunks.pool import chunk_pool
from shared.chunks.ranged_view import RangedView
from shared.chunks.registry import ChunkRegistry
from shared.chunks.view import ChunkView
from shared.engine.config import EngineConfig
from shared.kernels.launch import launches
from shared.models.causal_lm import CausalLM


def chunk_memory(
    config: EngineConfig, model: CausalLM, max_seq_len: int, registry: ChunkRegistry
) -> tuple[CachePoolProtocol, BatchView]:
    """See ``MakeMemory``; the pool joins ``registry`` if it can hold chunks."""
    if config.kv_cache_backend == "contiguous":
        registry.refusal = "kv_cache_backend is 'contiguous', and chunks are kept in blocks; leave it out."
        return contiguous_memory(config, model, max_seq_len)
    if config.batching_mode == "static":
        registry.refusal = "batching_mode is 'static', and chunks need continuous batching; leave batching_mode out."
        return bucket_memory(config, model, max_seq_len)
    is_launching = launches(model.norm.weight)
    if is_launching and config.attention_backend not in (None, "planned"):
        registry.refusal = (
            f"attention_backend is {config.attention_backend!r}, and on a GPU chunks need 'planned'; leave it out."
        )
        return bucket_memory(config, model, max_seq_len)
    buckets = buckets_of(config, model, max_seq_len)

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        make_view = RangedView if is_launching else ChunkView
        view = make_view(model.config, sizes, model.dtype, model.device, config.attention_backend, buckets)
        plan = planning(view.planner)

        def lay_out(layout: PagedLayout) -> PagedLayout:  # attention over ranges is planned by the view
            return layout if isinstance(layout, ChunkLayout) else plan(layout)

        return chunk_pool(sizes, registry, config.is_on("use_prefix_caching"), lay_out), view

    return make(sizes_for(config, model, max_seq_len, make))
