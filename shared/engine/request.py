"""A request: its prompt, its sampling parameters, and its state in the engine. Introduced in phase 2.

A request holds ids and counts, never tensors, text or queues, so it can be sent to another process. Invariant: its
tokens are the prompt followed by the outputs, and only ``append`` and :func:`append_next` change them.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple

from shared.engine.prompt import CheckedIds, packed
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


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a token and of the most likely alternatives, from raw logits, before any logits processor.

    ``top`` holds (token id, log-probability) in descending order: as many as the parameters ask for, plus the token
    itself if it is not among them, as in OpenAI's API. It is empty if they ask for none.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


RowLimit = Callable[[SamplingRow], SamplingRow]
"""Changes what a request's row may sample, depending on its index and on the tokens before it (phase 11.1)."""
_serials = itertools.count()
_row: Callable[[tuple[Any, ...]], SamplingRow] = partial(tuple.__new__, SamplingRow)  # compares all fields in C


@dataclass(eq=False)
class Request:
    """One request. ``seed`` is set even if ``params.seed`` is None, so sampling never depends on other requests.

    Requests compare by identity, since an id may be reused. ``end_ids`` are the ids that may end its output, from its
    parameters and from the model (``SamplingParams.end_ids``).
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    end_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of each output, if params ask for them
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of each prompt token, if requested
    num_computed_tokens: int = 0  # tokens whose keys and values the KV cache holds
    num_scheduled_tokens: int = 0  # computed tokens, plus those that steps in flight compute; set by the scheduler
    num_cached_tokens: int = 0  # found in the KV cache when it was first admitted; set by the scheduler
    num_pending_tokens: int = 0  # output tokens that steps in flight will sample; set by the scheduler
    draft_ids: list[int] = field(default_factory=list)  # the drafts of the step in flight; set by the drafter
    num_forced_drafts: int = 0  # how many of the last draft_ids a grammar forces (phase 12); set by the drafter
    num_certain_drafts: int = 0  # how many tokens a grammar forces after its newest known token; set by the drafter
    num_accepted_drafts: int = 0  # in all steps; set by the scheduler, as is the next field
    num_rejected_drafts: int = 0
    status: RequestStatus = RequestStatus.WAITING  # set by the scheduler
    last_step: int = 0  # the step that computed its last token; set by the scheduler
    error: str | None = None  # why it failed, as a message for the client
    constraint: object = None  # its grammar, and the grammar state after its output (phase 12); set by the engine
    limit_row: RowLimit | None = None  # enforces its thinking limits
    serial: int = field(default_factory=lambda: next(_serials))  # its number in this process, never reused
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # prompt and output tokens whose ids are known

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_ids)

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """The ids that end its output: ``end_ids`` without those that ``ignore_eos`` excludes."""
        return self.params.stop_token_ids if self.params.ignore_eos else self.end_ids

    @property
    def num_unscheduled_tokens(self) -> int:
        """The number of its tokens, known or pending, that no step has computed or is computing."""
        return self.num_tokens + self.num_pending_tokens - self.num_scheduled_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether the next step computes the prompt, or recomputes prompt and outputs after a preemption."""
        num_scheduled = self.num_scheduled_tokens
        return num_scheduled < self.num_prompt_tokens or num_scheduled + 1 < self.num_tokens + self.num_pending_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its newest output token, known or pending, is its only unscheduled one."""
        start = self.num_scheduled_tokens
        return start >= self.num_prompt_tokens and start + 1 == self.num_tokens + self.num_pending_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the request must compute its whole prompt, because log-probabilities of prompt tokens are missing.

        Cached keys and values of the prompt are not enough, since its logits are needed.
        """
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        """Prompt and outputs."""
        return self.prompt_ids + self.output_ids

    def ids(self, start: int, stop: int) -> list[int]:
        """``token_ids[start:stop]``, without building the whole list."""
        n = self.num_prompt_tokens
        return self.prompt_ids[start:stop] + self.output_ids[max(0, start - n) : max(0, stop - n)]

    @cached_property
    def packed_prompt(self) -> bytes:
        """``prompt_ids`` as int64."""
        ids = self.prompt_ids
        return ids.packed if isinstance(ids, CheckedIds) else packed(ids)

    def packed_ids(self, start: int, stop: int) -> bytes:
        """``token_ids[start:stop]`` as int64, 8 bytes each, without a Python loop over the ids of the prompt."""
        n = self.num_prompt_tokens
        if stop <= n:
            return self.packed_prompt[8 * start : 8 * stop]
        outputs = packed(self.output_ids[max(0, start - n) : stop - n])
        return outputs if start >= n else self.packed_prompt[8 * start :] + outputs

    @property
    def last_token_id(self) -> int:
        return (self.output_ids or self.prompt_ids)[-1]

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        self.output_ids.append(token_id)
        self.num_tokens += 1
        if self.params.logprobs is not None:
            self.output_logprobs.append(logprobs)

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Store the log-probabilities of the prompt tokens after ``start``, computed with the token at ``start``."""
        self.prompt_logprobs = [*(self.prompt_logprobs[: start + 1] or [None]), *logprobs]

    def sampling_row(self, num_drafts: int = 0, draft_id: int | None = None) -> SamplingRow:
        """The sampler's inputs for the token that follows the first ``num_drafts`` drafts, as if they were outputs.

        ``draft_id`` is the next draft, if there is one. Without drafts the row's ids are the request's own lists, which
        ``append`` changes.
        """
        params, output_ids = self.params, self.output_ids
        index = len(output_ids) + num_drafts
        masked_ids = self.end_ids if index < params.min_tokens else ()
        if num_drafts and (params.has_penalties or self.limit_row is not None):
            output_ids = output_ids + self.draft_ids[:num_drafts]
        fields = (params, self.seed, index, self.prompt_ids, output_ids, masked_ids, self.serial, num_drafts, draft_id)
        row = _row((*fields, None, None, self.constraint))
        return row if self.limit_row is None else self.limit_row(row)


def append_next(
    requests: Sequence[Request], token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None, step: int
) -> None:
    """Append a token to each request, and count the token that ``step`` computed for it.

    Args: logprobs: of each token; None if no request asks for them.
    """
    if logprobs is not None:
        for request, token_id, each in zip(requests, token_ids, logprobs, strict=True):
            append_next([request], [token_id], None, step)
            if request.params.logprobs is not None:
                request.output_logprobs.append(each)
        return
    for request, token_id in zip(requests, token_ids, strict=True):
        request.num_computed_tokens += 1
        request.num_pending_tokens -= 1
        request.last_step = step
        request.output_ids.append(token_id)
        request.num_tokens += 1
