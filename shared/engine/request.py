"""A request: its prompt, its sampling parameters, and its state in the engine. Introduced in phase 2.

A request holds ids and counts, never tensors, text or queues, so it can be sent to another process. Invariant: its
tokens are the prompt followed by the outputs, and only ``append`` changes them.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow


class RequestStatus(StrEnum):
    """The state of a request. WAITING: queued, holds no KV cache. RUNNING: holds KV cache and takes part in steps.
    PREEMPTED: queued again after its KV cache was freed. FINISHED and FAILED: final.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a token and of the most likely alternatives, from raw logits, before any logits processor.

    ``top`` holds (token id, log-probability) in descending order; it contains the sampled token only if that is among
    the most likely.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """One request. ``seed`` is set even if ``params.seed`` is None, so sampling never depends on other requests.

    Requests compare by identity, since an id may be reused.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of each output, if params ask for them
    num_computed_tokens: int = 0  # tokens whose keys and values the KV cache holds
    num_scheduled_tokens: int = 0  # computed tokens and those that steps in flight compute; set by the scheduler
    num_pending_tokens: int = 0  # output tokens that steps in flight will sample; set by the scheduler
    status: RequestStatus = RequestStatus.WAITING  # set by the scheduler
    last_step: int = 0  # the step that computed its last token; set by the scheduler
    error: str | None = None  # why it failed, as a message for the client
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # prompt and output tokens whose ids are known

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_ids)

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens, known or pending, that no step has computed or is computing."""
        return self.num_tokens + self.num_pending_tokens - self.num_scheduled_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether the next step computes the prompt, or recomputes prompt and outputs after a preemption."""
        num_scheduled = self.num_scheduled_tokens
        return num_scheduled < self.num_prompt_tokens or num_scheduled + 1 < self.num_tokens + self.num_pending_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and outputs."""
        return self.prompt_ids + self.output_ids

    @property
    def last_token_id(self) -> int:
        return (self.output_ids or self.prompt_ids)[-1]

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        self.output_ids.append(token_id)
        self.num_tokens += 1
        if self.params.logprobs is not None:
            self.output_logprobs.append(logprobs)

    def sampling_row(self) -> SamplingRow:
        """The sampler's inputs for the next token; previous token ids are included only under a repetition penalty."""
        seen = self.token_ids if self.params.repetition_penalty != 1 else ()
        return SamplingRow(self.params, self.seed, len(self.output_ids), seen)
