"""One prompt on its way to an answer. Introduced in phase 2.

A request holds ids and counts, never tensors, text or queues, so it could leave the process. Invariant: its tokens are
the prompt followed by the outputs, and only ``append`` changes them.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow


class RequestStatus(StrEnum):
    """Where a request is on its way. WAITING: it holds no memory. PREFILL: it holds memory, and what it has of prompt
    and answer is not yet computed. DECODE: it gets a token at a time. PREEMPTED: it waits again, after its memory went
    to an older one. FINISHED and FAILED: it holds nothing, and nothing follows.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass
class Request:
    """``seed`` is the request's own even where its params leave it open, so that its noise never depends on others."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose keys and values the memory holds; set by the engine
    status: RequestStatus = RequestStatus.WAITING  # set by the scheduler
    last_step: int = 0  # the step that gave its last token; set by the scheduler

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and outputs."""
        return self.prompt_ids + self.output_ids

    @property
    def last_token_id(self) -> int:
        return (self.output_ids or self.prompt_ids)[-1]

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to draw the next token; the ids so far only where they are read, under a penalty."""
        seen = self.token_ids if self.params.repetition_penalty != 1 else ()
        return SamplingRow(self.params, self.seed, len(self.output_ids), seen)
