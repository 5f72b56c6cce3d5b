"""Assembles a paged pool and its view from parts. Introduced in phase 6.

A phase names its parts: an attention (with the padding of its steps), an extension of the pool, and the storages by
``EngineConfig.kv_cache_dtype``. Invariant: pool and view agree in every size, and the pool lays steps out as the view's
attention needs them, since both are made here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.extension import NoExtension, PoolExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool_size import MakePaged, num_blocks_that_fit
from shared.cache.view.attention import NoPadding, Padding, PagedAttentionProtocol
from shared.cache.view.block_storage import BlockStorage, MakeStorage, PlainStorage
from shared.cache.view.interface import BatchView
from shared.cache.view.paged import PagedView
from shared.cache.view.paged_attention import paged_or_operations
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig

MakeAttention = Callable[[EngineConfig, CausalLM, PagedSizes, BlockStorage], tuple[PagedAttentionProtocol, Padding]]
MakeExtension = Callable[[EngineConfig, ModelConfig, PagedSizes], PoolExtension]


def unplanned_attention(
    config: EngineConfig, model: CausalLM, sizes: PagedSizes, storage: BlockStorage
) -> tuple[PagedAttentionProtocol, Padding]:
    """Attention by phase 6's kernels, or by PyTorch's operations; see ``MakeAttention``."""
    return paged_or_operations(model.config, sizes, storage, config.attention_backend), NoPadding()


def no_extension(config: EngineConfig, shape: ModelConfig, sizes: PagedSizes) -> PoolExtension:
    """Every block belongs to one request; see ``MakeExtension``."""
    return NoExtension()


@dataclass(frozen=True)
class PagedMemory:
    """Makes the pool and the view from these parts; see ``MakeMemory``."""

    attention: MakeAttention = unplanned_attention
    extension: MakeExtension = no_extension
    storages: Mapping[str, MakeStorage] = field(default_factory=lambda: {"auto": PlainStorage.of})

    def __call__(self, config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
        def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
            storage = self.storages[config.kv_cache_dtype](config, model, sizes)
            attention, padding = self.attention(config, model, sizes, storage)
            view = PagedView(model.config, sizes, model.dtype, storage, attention, padding)
            return PagedKVCachePool.of(sizes, self.extension(config, model.config, sizes), attention.lay_out), view

        return make(sizes_for(config, model, max_seq_len, make))


def sizes_for(config: EngineConfig, model: CausalLM, max_seq_len: int, make: MakePaged) -> PagedSizes:
    """The sizes of a pool of ``num_gpu_blocks`` blocks, or of as many as fit in free memory.

    Raises ConfigError if a sequence of ``max_seq_len`` tokens would not fit in the pool.
    """
    num_blocks = config.num_gpu_blocks
    if num_blocks is None:
        num_blocks = num_blocks_that_fit(config, model, max_seq_len, make)
    needed = -(-max_seq_len // config.block_size)
    if num_blocks < needed:
        whence = "" if config.num_gpu_blocks is not None else ", all that fit in free memory"
        raise ConfigError(
            f"num_gpu_blocks is {num_blocks}{whence}: {num_blocks * config.block_size} tokens in blocks of "
            f"{config.block_size}. One sequence may have max_seq_len = {max_seq_len} tokens, which is {needed} "
            "blocks; raise num_gpu_blocks or lower max_seq_len."
        )
    most_tokens = config.most_tokens_of_a_step(max_seq_len)
    return PagedSizes(num_blocks, config.block_size, config.max_batch_size, most_tokens, max_seq_len)
