"""Makes a pool and a view that compress, from an engine's settings. Introduced in phase 9.2.

Invariant: that of :mod:`shared.cache.paged_memory`; without ``compress_method`` the memory is phase 9's.
"""

from functools import partial

from shared.cache.layout.paged import PagedSizes
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.extension import NoExtension, PoolExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing, prefix_sharing
from shared.cache.view.attention import NoPadding, Padding, PagedAttentionProtocol
from shared.cache.view.block_storage import BlockStorage
from shared.cache.view.bucket_padding import bucket_attention, buckets_of
from shared.cache.view.interface import BatchView
from shared.cache.view.paged_attention import paged_or_operations
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.kernels.launch import launches
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.tracks.compression.compressors import COMPRESSORS
from shared.tracks.compression.kept_cells import KeptCells
from shared.tracks.compression.kernel_attention import CondensedKernels, decode_padding
from shared.tracks.compression.layout import Cells
from shared.tracks.compression.operations_attention import CondensedOperations
from shared.tracks.compression.pool import CompressedRequests
from shared.tracks.compression.selection import Budget


def condensed_attention(
    config: EngineConfig, model: CausalLM, sizes: PagedSizes, storage: BlockStorage
) -> tuple[PagedAttentionProtocol, Padding]:
    """See :data:`shared.cache.paged_memory.MakeAttention`."""
    assert config.compress_method is not None
    compressor = COMPRESSORS[config.compress_method](model.config.attention_scale)
    bounds = config.layer_budget, config.layer_upper_budget
    budget = Budget(*bounds, config.p_attn, reduction=config.attn_reduce_method)
    arguments = compressor, budget, config.query_window_size, not config.if_fake_compress
    kept = KeptCells(model.config, sizes, model.dtype, storage, *arguments)
    if config.attention_backend is None and launches(storage.keys):
        buckets = buckets_of(config, model, sizes.max_seq_len)
        attention = CondensedKernels(model.config, sizes, storage, kept, config.is_on("use_cuda_graphs"))
        return attention, decode_padding(model.config, sizes, buckets, kept)
    plain = paged_or_operations(model.config, sizes, storage, config.attention_backend or "sdpa")
    return CondensedOperations(plain, kept), NoPadding()


def compressed_requests(config: EngineConfig, shape: ModelConfig, sizes: PagedSizes) -> CompressedRequests:
    """See :data:`shared.cache.paged_memory.MakeExtension`."""
    sharing: PoolExtension = NoExtension()
    if config.is_on("use_prefix_caching"):
        sharing = PrefixSharing(sizes.block_size, partial(num_shareable, config))
    return CompressedRequests(Cells.of(shape, sizes), sharing)


def num_shareable(config: EngineConfig, request: Request) -> int:
    """A request's leading tokens, up to the first whose query the first compression may use.

    There are fewer of them than known tokens, so no block is copied.
    """
    first = config.layer_budget + config.steps_between_compressions
    last = max(request.num_prompt_tokens, first) - config.query_window_size
    return max(0, min(last, request.num_tokens - 1))


WITHOUT_COMPRESSION = PagedMemory(bucket_attention, prefix_sharing)
COMPRESSING = PagedMemory(condensed_attention, compressed_requests)


def condensed_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""
    make_memory = WITHOUT_COMPRESSION if config.compress_method is None else COMPRESSING
    return make_memory(config, model, max_seq_len)
