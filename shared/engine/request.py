"""One prompt on its way to an answer. Introduced in phase 2.

A request holds ids and counts, never tensors, text or queues, so it could leave the process. Invariant: its tokens are
the prompt followed by the outputs, and only ``append`` changes them.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow


class RequestStatus(StrEnum):
    """Where a request is on its way. WAITING: it holds no memory. RUNNING: it holds memory, and takes part in steps.
    PREEMPTED: it waits again, after its memory went to an older one. FINISHED and FAILED: nothing follows.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a token and of the likeliest ones in its place, from raw logits, before any processor.

    ``top`` holds (token id, log-probability), the likeliest first; the chosen token is there only if it is among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """``seed`` is the request's own even where its params leave it open, so that its noise never depends on others.

    Requests are compared by identity: an id may be used again, and what was meant for the first stays with the first.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of each output, where params ask
    num_computed_tokens: int = 0  # tokens whose keys and values the KV cache holds
    num_scheduled_tokens: int = 0  # those, and the tokens that steps in flight compute; set by the scheduler
    num_pending_tokens: int = 0  # output tokens that steps in flight will bring; set by the scheduler
    status: RequestStatus = RequestStatus.WAITING  # set by the scheduler
    last_step: int = 0  # the step that gave its last token; set by the scheduler
    error: str | None = None  # why it failed, in a sentence for the client
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # whose ids are known: of prompt and outputs

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_ids)

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens, known or in flight, that no step computes yet."""
        return self.num_tokens + self.num_pending_tokens - self.num_scheduled_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether the next step has to compute its prompt, or again what was known before a preemption."""
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
        """What the sampler needs to draw the next token; the ids so far only where they are read, under a penalty."""
        seen = self.token_ids if self.params.repetition_penalty != 1 else ()
        return SamplingRow(self.params, self.seed, len(self.output_ids), seen)
