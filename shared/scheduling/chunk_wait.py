"""How many tokens a chunk may have while other requests decode, derived from how long those requests may wait.
Introduced in phase 7.

An engine computes this once, when its model is loaded, from the table of step costs
(:mod:`shared.scheduling.step_costs`). Invariant: no clock is read, so the same queue gives the same chunks in every
run.
"""

from dataclasses import replace

from shared.engine.config import EngineConfig
from shared.models.causal_lm import CausalLM
from shared.scheduling.step_costs import step_costs

LEAST_CHUNK = 64
"""Minimum tokens of a chunk, whatever the wait: with fewer, a step reads the weights for too few tokens."""


def within_wait(config: EngineConfig, model: CausalLM) -> EngineConfig:
    """The settings with ``prefill_wait_ms`` converted to ``chunk_beside_decoding``: the largest multiple of LEAST_CHUNK
    within the token budget whose step takes no longer, and at least LEAST_CHUNK. The chunks of several prompts in a
    step add up.
    """
    if config.prefill_wait_ms is None:
        return config
    costs, wait = step_costs(model), config.prefill_wait_ms / 1e3
    sizes = range(LEAST_CHUNK, config.max_num_batched_tokens + 1, LEAST_CHUNK)
    size = max((size for size in sizes if costs.cost(size) <= wait), default=LEAST_CHUNK)
    return replace(config, prefill_wait_ms=None, chunk_beside_decoding=size)
