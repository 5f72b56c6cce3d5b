"""Makes a pool and a view that hold chunks, from an engine's settings. Introduced in phase 9.1.

Chunks need blocks, continuous batching, and so far a CPU: on a GPU no kernel reads several ranges of blocks. Where they
cannot be had, the memory is that of phase 9 and the registry refuses chunks. Invariant: that of
:mod:`shared.cache.planned_memory`.
"""

from shared.cache.bucket_memory import bucket_memory
from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_memory import sizes_for
from shared.cache.pool import CachePoolProtocol
from shared.cache.view import BatchView
from shared.chunks.pool import ChunkKVCachePool
from shared.chunks.registry import ChunkRegistry
from shared.chunks.view import ChunkView
from shared.engine.buckets import Buckets
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
    if config.batching_mode == "static" or launches(model.norm.weight):
        name, value = ("device", config.device) if config.batching_mode != "static" else ("batching_mode", "static")
        needed = "a CPU" if name == "device" else "continuous batching"
        registry.refusal = f"{name} is {value!r}, and chunks need {needed}; leave {name} out."
        return bucket_memory(config, model, max_seq_len)
    if config.use_cuda_graphs:
        return bucket_memory(config, model, max_seq_len)  # which refuses

    def make(sizes: PagedSizes) -> tuple[ChunkKVCachePool, BatchView]:
        about = (model.dtype, model.device, config.attention_backend, Buckets((), ()))
        view = ChunkView(model.config, sizes, *about)
        return ChunkKVCachePool(sizes, view.planner, registry, config.is_on("use_prefix_caching")), view

    return make(sizes_for(config, model, max_seq_len, make))
