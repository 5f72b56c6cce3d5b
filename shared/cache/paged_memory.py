"""Both sides of a memory of blocks, of the size that an engine's settings ask for. Introduced in phase 6.

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
    """``num_gpu_blocks``, or as many blocks as there is memory for.

    Raises ConfigError where a sequence of ``max_seq_len`` tokens would not fit.
    """
    num_blocks = config.num_gpu_blocks
    if num_blocks is None:
        num_blocks = num_blocks_that_fit(config, model, max_seq_len, make)
    needed = -(-max_seq_len // config.block_size)
    if num_blocks < needed:
        whence = "" if config.num_gpu_blocks is not None else ", all that the memory has room for"
        raise ConfigError(
            f"num_gpu_blocks is {num_blocks}{whence}: {num_blocks * config.block_size} tokens in blocks of "
            f"{config.block_size}. One sequence may have max_seq_len = {max_seq_len} tokens, which is {needed} "
            "blocks; raise the one or lower the other."
        )
    most_tokens = config.most_tokens_of_a_step(max_seq_len)
    return PagedSizes(num_blocks, config.block_size, config.max_batch_size, most_tokens, max_seq_len)
