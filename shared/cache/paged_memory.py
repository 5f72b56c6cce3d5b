"""Makes a paged pool and its view from an engine's settings. Introduced in phase 6.

Invariant: pool and view agree in every size, since both are made here.
"""

from shared.cache.paged import PagedKVCachePool
from shared.cache.paged_layout import PagedSizes
from shared.cache.paged_view import PagedView
from shared.cache.pool_size import MakePaged, num_blocks_that_fit
from shared.cache.view import BatchView
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM


def paged_memory(config: EngineConfig, model: CausalLM, max_seq_len: int) -> tuple[PagedKVCachePool, BatchView]:
    """See ``MakeMemory``."""

    def make(sizes: PagedSizes) -> tuple[PagedKVCachePool, BatchView]:
        view = PagedView(model.config, sizes, model.dtype, model.device, config.attention_backend)
        return PagedKVCachePool(sizes.num_blocks, sizes.block_size, sizes.max_sequences, sizes.max_seq_len), view

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
