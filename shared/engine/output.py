"""From sampled token ids to text and a finish reason. Introduced in phase 2.

Invariants: text is released once and never withdrawn; it continues the prompt's text; the text of end-of-sequence
tokens, stop tokens and stop strings is never released; exactly one output of a request, its last, has a finish reason.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shared.engine.request import Request, TokenLogprobs
from shared.text.detokenizer import IncrementalDecoder
from shared.text.stopping import FinishReason, StopChecker
from shared.text.tokenizer import Tokenizer


class StepOutput(NamedTuple):
    """What one token adds to a request's output. ``text`` is empty while a character or a stop string is incomplete.

    The first output of a request states how many of its prompt's tokens were found in the KV cache when it was first
    admitted. If the request's parameters ask for them, it also has the prompt's log-probabilities: one entry per prompt
    token, None for the first. A request that generates nothing (``max_new_tokens`` 0) has a single output without a
    token, and finishes by length. The last output of a failed request has no token either: ``finish_reason`` is ERROR
    and ``error`` is a message for the client.

    The last output of a request that has not failed states how many drafts are part of its output, and how many were
    wasted (phase 11): rejected, or accepted after the stop string that ended it.
    """

    request_id: str
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    logprobs: TokenLogprobs | None = None  # if the request's parameters ask for them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    error: str | None = None


make_output: Callable[[tuple[Any, ...]], StepOutput] = partial(tuple.__new__, StepOutput)
"""Makes an output from all its fields, in order; implemented in C."""


class OutputStream:
    """Turns one request's tokens into outputs.

    Args:
        max_seq_len: the request also finishes, by length, when its prompt and output reach this length.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self.request_id = request.request_id
        self.num_tokens = 0  # output tokens so far
        self.has_ended = False
        completes = request.params.structured_output is None
        self.decoder = IncrementalDecoder(tokenizer, request.prompt_ids, completes=completes)
        self.has_stops = bool(request.params.stop)
        self.stops = StopChecker(request.params.stop)
        self.eos_ids = frozenset() if request.params.ignore_eos else tokenizer.eos_ids
        self.end_ids = self.eos_ids | set(request.params.stop_token_ids)
        self.min_tokens = request.params.min_tokens
        self.has_grammar = request.params.structured_output is not None
        self.limit = min(request.params.max_new_tokens, max_seq_len - len(request.prompt_ids))

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> StepOutput:
        """Append the next output token and return what it adds.

        The text of the first ``min_tokens`` tokens is not searched for stop strings, as in vLLM. An end id among them
        ends a grammar.
        """
        self.num_tokens += 1
        if token_id not in self.end_ids and self.num_tokens < self.limit and not self.has_stops:
            text = self.decoder.push(token_id)
            return make_output((self.request_id, token_id, text, None, None, logprobs, None, 0, 0, 0, None))
        reason = None
        may_stop = self.num_tokens > self.min_tokens
        if (may_stop or self.has_grammar) and token_id in self.end_ids:
            text, reason = self._rest(), FinishReason.EOS if token_id in self.eos_ids else FinishReason.STOP
        else:
            text = self.decoder.push(token_id)
            if self.has_stops and may_stop:
                text = self.stops.push(text)
            if self.num_tokens >= self.limit and self.stops.matched is None:
                text, reason = text + self._rest(), FinishReason.LENGTH
        stop = self.stops.matched
        if stop is not None:
            reason = FinishReason.STOP
        self.has_ended = reason is not None
        return StepOutput(self.request_id, token_id, text, reason, stop, logprobs)

    def end(self) -> StepOutput:
        """The output of a request that generates nothing, once its prompt is computed."""
        self.has_ended = True
        return StepOutput(self.request_id, None, "", FinishReason.LENGTH)

    def _rest(self) -> str:
        """The text held back so far; it may still complete a stop string."""
        text = self.stops.push(self.decoder.flush())
        return text if self.stops.matched is not None else text + self.stops.flush()
