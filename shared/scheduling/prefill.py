"""Prefill of whole prompts, and the entries of a step. Introduced in phase 4.

An entry is granted to a request with :func:`grant`, which updates the counts of what is in flight.
"""

from collections.abc import Iterable, Sequence

from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.scheduling.schedule import Scheduled


class WholePrompts:
    """Computes each prompt in one step, and the prompts of a step within the token budget; the first may exceed it."""

    def __init__(self, config: EngineConfig) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens

    def prompts(self, running: Iterable[Request]) -> list[Request]:
        """The first request that needs a prefill, and the following ones within the token budget."""
        chosen: list[Request] = []
        num_tokens = 0
        for request in running:
            if not request.is_prefilling:
                continue
            num_tokens += request.num_unscheduled_tokens
            if chosen and num_tokens > self.max_num_batched_tokens:
                break
            chosen.append(request)
        return chosen

    def fill(self, decoding: Sequence[Request], prompts: Sequence[Request]) -> tuple[Scheduled, ...]:
        """The entries of a step: all unscheduled tokens of these requests."""
        return tuple([grant(request, request.num_unscheduled_tokens) for request in (*decoding, *prompts)])


def grant(request: Request, num_tokens: int, *, is_last: bool = True) -> Scheduled:
    """Schedule a request's next ``num_tokens`` tokens.

    A token is sampled if these are its last tokens (``is_last``) and it generates any.
    """
    start, params = request.num_scheduled_tokens, request.params
    num_sampled = int(params.max_new_tokens > 0 and is_last)
    num_prompt_logprobs = 0
    if params.prompt_logprobs is not None and request.needs_prompt_logits:
        num_prompt_logprobs = min(num_tokens, max(0, request.num_prompt_tokens - 1 - start))
    request.num_scheduled_tokens += num_tokens
    request.num_pending_tokens += num_sampled
    return Scheduled(request, start, num_tokens, 0, num_sampled, num_prompt_logprobs)
