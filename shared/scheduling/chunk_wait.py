"""How many tokens a chunk may have while other requests decode, derived from how long those requests may wait.
Introduced in phase 7.

An engine computes this once, when its model is loaded, from the table of step costs
(:mod:`shared.scheduling.step_costs`). Invariant: no clock is read, so the same queue gives the same chunks in every
run.
"""

import logging
from bisect import bisect_right
from dataclasses import replace

from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM
from shared.scheduling.step_costs import step_costs

logger = logging.getLogger("infer.engine")

LEAST_CHUNK = 64
"""Minimum tokens of a chunk, whatever the wait: with fewer, a step reads the weights for too few tokens."""


def within_wait(config: EngineConfig, model: CausalLM) -> EngineConfig:
    """The settings with ``prefill_wait_ms`` converted to ``chunk_beside_decoding``: the largest multiple of LEAST_CHUNK
    within the token budget whose step takes no longer, and at least LEAST_CHUNK, with a warning if that takes longer.
    The chunks of several prompts in a step add up.
    """
    if config.prefill_wait_ms is None:
        return config
    costs = step_costs(model)
    wait: float = config.prefill_wait_ms
    sizes = range(LEAST_CHUNK, config.max_num_batched_tokens + 1, LEAST_CHUNK)
    num_within = bisect_right(sizes, wait, key=lambda size: 1e3 * costs.cost(size))  # costs never fall
    size = sizes[num_within - 1] if num_within else LEAST_CHUNK
    level = logging.INFO if num_within else logging.WARNING
    text = "prefill_wait_ms is %d: chunks of %d tokens, whose step takes %.3g ms by the table of step costs"
    logger.log(level, text, wait, size, 1e3 * costs.cost(size))
    return replace(config, prefill_wait_ms=None, chunk_beside_decoding=size)
