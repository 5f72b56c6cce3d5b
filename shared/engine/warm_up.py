"""Warm-up: compile kernels before serving. Introduced in phase 4.

Kernels are compiled, and libraries select theirs, when a shape first occurs. On a GPU that takes up to a second per
kernel, so the warm-up runs every batch size once, prompts from one token up to a long one, and a step that is too large
for any CUDA graph. On a CPU one short request suffices. No two requests share a cached prefix, since that would skip
computation. Invariant: afterwards the engine holds none of the warm-up requests, and its KV cache holds none of their
tokens. From phase 12 on the vocabulary's trie is also built here, so that the first request with a grammar does not
stall all others.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from shared.engine.config import EngineConfig
from shared.errors import QueueFullError
from shared.sampling.params import SamplingParams
from shared.scheduling.chunks import chunk_size
from shared.scheduling.policies import POLICIES

LONGEST_PROMPT = 4096  # for a single request; longer prompts use the same kernels
FIRST_PROMPT, MORE_TOKENS = 24, 7  # for a full batch: each prompt is longer than the one before


class Steps(Protocol):
    """The interface of an engine that is warmed up."""

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str: ...

    def step(self) -> Any: ...

    def has_work(self) -> bool: ...


def warm_up(engine: Any) -> None:
    """Warm up an engine of phase 4 or later."""
    config, capacity_tokens = engine.config, engine.pool.capacity_tokens
    is_gpu = engine.model.device.type == "cuda"
    together = rounds(config.max_batch_size, engine.max_seq_len, is_gpu=is_gpu, capacity_tokens=capacity_tokens)
    serve_rounds(engine, together)
    if graphs := getattr(engine.runner.executor, "graphs", {}):  # by bucket
        most_captured = max(bucket.num_tokens for bucket in graphs)
        serve_beside_decoding(engine, beyond_graphs(config, most_captured, engine.max_seq_len, capacity_tokens))
    if hasattr(engine, "constraints"):
        engine.constraints.prepare()
        # loads the tokens onto the device, and compiles the kernels that make masks
        if engine.constraints.pool is not None:
            from shared.grammar.grammar import Grammar

            params = SamplingParams(max_new_tokens=2, structured_output=Grammar.regex("[a-z]+"))
            add(engine, warm_up_prompt(0, 1), params, "warm-up-grammar")
            while engine.has_work():
                engine.step()
    engine.pool.drop_cached()


def serve_rounds(engine: Steps, requests: Iterable[Sequence[tuple[int, int]]]) -> None:
    """Run the rounds one after the other."""
    for number, together in enumerate(requests):
        add_all(engine, f"warm-up-{number}", together)
        while engine.has_work():
            engine.step()


def serve_beside_decoding(engine: Steps, lengths: Sequence[int]) -> None:
    """Run prompts of these lengths, if there are any, in a step in which another request decodes."""
    if lengths:
        add_all(engine, "warm-up-decoding", [(1, 3)])
        engine.step()
        add_all(engine, "warm-up-beside", [(length, 2) for length in lengths])
        while engine.has_work():
            engine.step()


def add_all(engine: Steps, name: str, requests: Sequence[tuple[int, int]]) -> None:
    """Queue requests of (prompt tokens, new tokens); every second one is greedy."""
    for n, (num_prompt, num_new) in enumerate(requests):
        options: dict[str, Any] = {"temperature": 0.7 if n % 2 == 0 else 0.0, "seed": n, "ignore_eos": True}
        params = SamplingParams(max_new_tokens=num_new, cache_salt=f"{name}-{n}", **options)
        add(engine, warm_up_prompt(n, num_prompt), params, f"{name}-{n}")


def add(engine: Steps, prompt: Sequence[int], params: SamplingParams, request_id: str) -> None:
    """Queue a request, running steps while the queue is full."""
    while True:
        try:
            engine.add_request(prompt, params, request_id)
        except QueueFullError:
            engine.step()
        else:
            return


def warm_up_prompt(n: int, num_tokens: int) -> list[int]:
    """The prompt of the n-th request of a round."""
    return [n % 7 + 1] * num_tokens


def rounds(
    max_batch_size: int, max_seq_len: int, *, is_gpu: bool, capacity_tokens: int | None = None
) -> list[list[tuple[int, int]]]:
    """(prompt tokens, new tokens) of the requests of each round.

    On a GPU single prompts of power-of-two lengths, then a full batch that shrinks by one request a step. The prompts
    of a round take at most half of ``capacity_tokens``; None: no limit.
    """
    longest = most_new = longest_prompt(max_seq_len, capacity_tokens)
    if not is_gpu:
        return [[(min(8, longest), min(2, most_new))]]
    alone = [(1 << n, min(2, most_new)) for n in range(LONGEST_PROMPT.bit_length()) if 1 << n <= longest]
    if capacity_tokens is not None:
        longest = max(1, min(longest, capacity_tokens // (2 * max_batch_size)))
    batch = [(min(FIRST_PROMPT + MORE_TOKENS * n, longest), min(n + 2, most_new)) for n in range(max_batch_size)]
    return [*([request] for request in alone), batch]


def beyond_graphs(config: EngineConfig, most_captured: int, max_seq_len: int, capacity_tokens: int) -> list[int]:
    """Lengths of the fewest prompts that make a step too large for a graph, in one chunk each beside a request that
    decodes; none if no step can hold them, or if they take more than half of ``capacity_tokens``.

    Args:
        most_captured: tokens of the largest captured step.
    """
    longest = longest_prompt(max_seq_len, capacity_tokens)
    chunk = chunk_size(config, longest, 1) if config.is_on("use_chunked_prefill") else longest
    number = -(-(most_captured + 1) // min(chunk, longest))
    lengths = [-(-(most_captured + 1) // number)] * number
    per_step = POLICIES[config.scheduler_policy].max_prompts, config.max_prefill_chunks_per_step
    limits = (config.max_batch_size - 1, config.max_waiting_requests, *per_step)
    is_step = sum(lengths) < config.max_num_batched_tokens and all(not most or number <= most for most in limits)
    return lengths if is_step and 2 * sum(lengths) <= capacity_tokens else []


def longest_prompt(max_seq_len: int, capacity_tokens: int | None) -> int:
    """Maximum prompt tokens of a request: half of what a request, or the KV cache, may have."""
    return max(1, min(max_seq_len, capacity_tokens or max_seq_len) // 2)
