"""The settings of a draft model's memory. Introduced in phase 11."""

from dataclasses import replace
from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig

OF_TARGET = (
    "quantization",
    "quantize_head",
    "use_speculative_decoding",
    "drafter",
    "draft_model",
    "spec_length",
    "acceptance_method",
    "adapt_spec_length",
    "draft_ranks",
    "draft_on_each_rank",
)
"""Settings that do not apply to the draft model, whose weights are as in its checkpoint."""


def memory_settings(config: EngineConfig, pool: CachePoolProtocol) -> EngineConfig:
    """The settings of the draft model's memory: the same number of blocks as the model."""
    own: dict[str, Any] = {name: EngineConfig.__dataclass_fields__[name].default for name in OF_TARGET}
    if config.kv_cache_backend != "contiguous":
        own["num_gpu_blocks"] = pool.capacity_tokens // config.block_size
    return replace(config, **own | {"model": config.draft_model})
