"""Makes a pool and a view that compress, from an engine's settings. Introduced in phase 9.2.

Invariant: that of :mod:`shared.cache.paged_memory`; without ``compress_method`` the memory is phase 9's.
"""

from dataclasses import replace
from functools import partial

from shared.cache.layout.paged import PagedSizes
from shared.cache.paged_memory import PagedMemory, sizes_for
from shared.cache.pool.extension import NoExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing, prefix_sharing
from shared.cache.view.bucket_padding import bucket_attention, buckets_of
from shared.cache.view.interface import BatchView
from shared.engine.config import EngineConfig
from shared.engine.executor.buckets import Buckets
from shared.engine.request import Request
from shared.kernels.launch import launches
from shared.models.causal_lm import CausalLM
from shared.tracks.compression.bucket_view import CondensedBucketView
from shared.tracks.compression.compressors import COMPRESSORS
from shared.tracks.compression.pool import CompressedRequests
from shared.tracks.compression.selection import Budget
from shared.tracks.compression.view import CondensedView

WITHOUT_COMPRESSION = PagedMemory(bucket_attention, prefix_sharing)


def condensed_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    if config.compress_method is None:
        return WITHOUT_COMPRESSION(config, model, max_seq_len)
    compressor = COMPRESSORS[config.compress_method](model.config.attention_scale)
    bounds = config.layer_budget, config.layer_upper_budget
    budget = Budget(*bounds, config.p_attn, reduction=config.attn_reduce_method)
    about = compressor, budget, config.query_window_size, not config.if_fake_compress

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        shape = (model.config, sizes, model.dtype, model.device)
        if config.attention_backend is None and launches(model.norm.weight):
            view: CondensedView = CondensedBucketView(*shape, decode_buckets(config, model, max_seq_len), *about)
            if isinstance(view, CondensedBucketView) and view.selector is not None:
                view.selector.is_recording &= config.is_on("use_cuda_graphs")
        else:
            view = CondensedView(*shape, config.attention_backend, *about)
        sharing: NoExtension | PrefixSharing = NoExtension()
        if config.is_on("use_prefix_caching"):
            sharing = PrefixSharing(sizes.block_size, partial(num_shareable, config))
        return PagedKVCachePool.of(sizes, CompressedRequests(view.cells, sharing)), view

    return make(sizes_for(config, model, max_seq_len, make))


def num_shareable(config: EngineConfig, request: Request) -> int:
    """The tokens of a request, from the first, before those whose queries its first compression may use.

    They are fewer than all known tokens, so no block is copied.
    """
    first = config.layer_budget + config.steps_between_compressions
    last = max(request.num_prompt_tokens, first) - config.query_window_size
    return max(0, min(last, request.num_tokens - 1))


def decode_buckets(config: EngineConfig, model: CausalLM, max_seq_len: int) -> Buckets:
    """The buckets of decode steps; a step with prompts is run eagerly."""
    return replace(buckets_of(config, model, max_seq_len), mixed=())
