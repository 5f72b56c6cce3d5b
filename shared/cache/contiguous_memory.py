"""Makes a contiguous pool and its view from an engine's settings. Introduced in phase 4.

Invariant: pool and view agree in every size, since both are made here.
"""

from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.view.contiguous_pool import ContiguousPoolView
from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM


def contiguous_memory(
    config: EngineConfig, model: CausalLM, max_seq_len: int
) -> tuple[ContiguousKVCachePool, ContiguousPoolView]:
    """See ``MakeMemory``: a region of ``max_seq_len`` tokens for each of ``max_batch_size`` requests."""
    sizes = config.max_batch_size, max_seq_len, config.most_tokens_of_a_step(max_seq_len)
    view = ContiguousPoolView(model.config, *sizes, model.dtype, model.device, config.attention_backend)
    return ContiguousKVCachePool(config.max_batch_size, max_seq_len), view
