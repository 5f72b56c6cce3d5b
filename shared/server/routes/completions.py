"""``POST /v1/completions``: continue texts. Introduced in phase 4.

The response is one JSON body, a stream of OpenAI's unnamed frames, or a stream of the named events ``token``, ``done``
and ``error``. Invariants of both streams: one frame per generated token, in the order of its choice, including an
end-of-sequence token; its data is a chunk of OpenAI's ``text_completion``; named events end with exactly one ``done``
or ``error``, unnamed frames with ``[DONE]``.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from shared.engine.output import StepOutput
from shared.grammar.progress import Progress
from shared.grammar.tokens.fsm import TokenFSM
from shared.server.answers.answer import Answer
from shared.server.answers.answer_stream import AnswerStream
from shared.server.answers.echo import Echo
from shared.server.answers.intake import Intake
from shared.server.answers.logprobs import completion_logprobs, scored
from shared.server.bodies.protocol import CompletionRequest
from shared.server.bodies.structured_output import described_grammar
from shared.server.errors import ApiError, invalid
from shared.server.http.event_stream import EventStreamResponse, WholeResponse
from shared.server.http.middleware import record_of
from shared.server.http.sse import DONE, frame, to_json
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

OPENAI_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's ``finish_reason`` for each way in which generation ends by itself."""

router = APIRouter()
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "one body, or a stream", "content": {"application/json": {}, "text/event-stream": {}}}
}
"""The successful responses of both routes, for the OpenAPI schema."""


@router.post("/v1/completions", response_class=Response, responses=ANSWER, summary="Continue texts")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """One JSON body, or with `stream` server-sent events without names, the last of which is `[DONE]`.

    A request without `stream` whose `Accept` names `text/event-stream` gets the events `token`, `done` and `error`.
    """
    intake: Intake = request.app.state.intake
    is_named = intake.config.named_events or (body.stream is None and accepts_events(request))
    record_of(request.scope).is_streaming = is_streaming = is_named or bool(body.stream)
    intake.check(body)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens is 0; it must be at least 1, or 0 together with echo.", param="max_tokens")
    max_tokens = intake.within_limit("max_tokens", body.max_tokens)
    prompt_logprobs = body.logprobs if body.echo else None
    if max_tokens == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # the engine accepts a request that generates nothing only if there is something to compute
    has_special = body.add_special_tokens is not False
    prompts = [await intake.text_ids(prompt, has_special) for prompt in body.prompt]
    if max_tokens is None:
        max_tokens = intake.within_room(intake.config.max_tokens, max(map(len, prompts)))
    params = body.sampling_params(max_tokens, body.logprobs, prompt_logprobs, intake.config.sampling_defaults)
    params = await intake.with_grammar(params, described_grammar(body, is_closed=intake.config.close_objects))
    watched = await intake.watched(params, body)
    answer = intake.submit(request, body, prompts, params, kind="cmpl")
    frames = CompletionFrames(
        answer,
        intake.config.model_name,
        intake.tokenizer,
        is_named=is_named,
        wants_usage=body.wants_usage,
        wants_usage_so_far=body.wants_usage_so_far,
        watched=watched,
        echo=Echo(intake.tokenizer, body.prompt, has_logprobs=body.logprobs is not None) if body.echo else None,
    )
    if is_streaming:
        return EventStreamResponse(answer, intake.config, frames)
    return WholeResponse(answer, intake.config, frames.whole)


def at_token(progress: Mapping[AnswerStream, Progress], choice: AnswerStream, output: StepOutput) -> dict[str, Any]:
    """The field with the grammar state in which a token was sampled; empty for a choice that is not watched."""
    if choice not in progress or output.token_id is None:
        return {}
    position = progress[choice].read(output.token_id)
    return {"grammar": None if position is None else position._asdict()}


def accepts_events(request: Request) -> bool:
    """Whether the header `Accept` names `text/event-stream`; a wildcard does not."""
    kinds = (kind.partition(";")[0].strip().lower() for kind in request.headers.get("accept", "").split(","))
    return "text/event-stream" in kinds


class CompletionFrames:
    """Formats one answer, as frames of a stream or as one body.

    Args:
        is_named: frames are the events ``token``, ``done`` (with the usage) and ``error``; otherwise OpenAI's, which
            have no names and end with ``[DONE]``.
        wants_usage: add a last chunk with the usage and no choices; the others then hold ``"usage": null``. No effect
            on named events.
        wants_usage_so_far: with ``wants_usage``, the others hold the usage so far.
        watched: the grammar whose state is added to each token's frame.
        echo: the prompts, which then precede the text of their choices.
    """

    def __init__(
        self,
        answer: Answer,
        model_name: str,
        tokenizer: Tokenizer,
        *,
        is_named: bool,
        wants_usage: bool = False,
        wants_usage_so_far: bool = False,
        watched: TokenFSM | None = None,
        echo: Echo | None = None,
    ) -> None:
        created = int(time.time())
        self._head = {"id": answer.request_id, "object": "text_completion", "created": created, "model": model_name}
        self._answer = answer
        self._tokenizer = tokenizer
        self._is_named = is_named
        self._wants_usage = wants_usage and not is_named
        self._wants_usage_so_far = wants_usage_so_far and not is_named
        self._num_sent = 0  # tokens in frames so far
        self._progress = {} if watched is None else {choice: Progress(watched) for choice in answer.choices}
        self._echo = echo
        self._length = [0] * len(answer.choices)  # characters of each choice so far, if requested
        self._is_begun = [echo is None] * len(answer.choices)  # whether the choice's prompt has been sent
        self._parts = [self._prepared(index) for index in range(len(answer.choices))]

    def start(self) -> bytes:
        return b""

    def tokens(self, choice: AnswerStream, outputs: Sequence[StepOutput]) -> bytes:
        return b"".join([self._token(choice, output) for output in outputs])

    def finish(self, choice: AnswerStream) -> bytes:
        return b"" if self._is_named else frame(to_json(self._chunk([self._last(choice)], None)))

    def end(self) -> bytes:
        answer = self._answer
        if self._is_named:
            done = self._chunk([self._last(choice) for choice in answer.choices], None)
            return frame(to_json({**done, "usage": answer.usage}), "done")
        last = frame(to_json({**self._head, "choices": [], "usage": answer.usage})) if self._wants_usage else b""
        return last + DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body(), self._name("error")) + (b"" if self._is_named else DONE)

    def whole(self, outputs: Sequence[Sequence[StepOutput]]) -> bytes:
        """The body of an answer that is not streamed."""
        answer = self._answer
        choices = []
        for choice, own in zip(answer.choices, outputs, strict=True):
            text, tokens = self._begun(choice)
            text, tokens = text + "".join(output.text for output in own), tokens + scored(own)
            logprobs = completion_logprobs(self._tokenizer, tokens, 0) if tokens else None
            choices.append({**self._last(choice), "text": text, "logprobs": logprobs})
        return to_json({**self._head, "choices": choices, "usage": answer.usage})

    def _token(self, choice: AnswerStream, output: StepOutput) -> bytes:
        assert output.token_id is not None
        self._num_sent += 1
        index = choice.index
        if output.logprobs is None and self._is_begun[index] and not self._progress:
            before, between, after = self._parts[index]
            if self._wants_usage_so_far:
                after = b',"usage":%b}\n\n' % to_json(self._answer.usage_after(self._num_sent))
            return b"%b%b%b%d%b" % (before, to_json(output.text), between, output.token_id, after)
        text, tokens = self._begun(choice)
        shown = self._shown(index, text + output.text, tokens + scored([output]))
        chunk = self._chunk([shown], output.token_id) | at_token(self._progress, choice, output)
        return frame(to_json(chunk), self._name("token"))

    def _last(self, choice: AnswerStream) -> dict[str, Any]:
        """The end of a choice, preceded by its prompt if no token has sent it."""
        assert choice.finish_reason is not None
        text, tokens = self._begun(choice)
        ended = {"finish_reason": OPENAI_REASONS[choice.finish_reason], "stop_reason": choice.stop}
        return {**self._shown(choice.index, text, tokens), **ended}

    def _begun(self, choice: AnswerStream) -> tuple[str, list[Any]]:
        """A choice's prompt and its tokens with log-probabilities, if requested and not yet sent."""
        if self._echo is None or self._is_begun[choice.index]:
            return "", []
        self._is_begun[choice.index] = True
        return self._echo.of(choice, len(self._answer.choices))

    def _shown(self, index: int, text: str, tokens: Sequence[Any]) -> dict[str, Any]:
        logprobs = completion_logprobs(self._tokenizer, tokens, self._length[index]) if tokens else None
        self._length[index] += len(text)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]], token_id: int | None) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices, "token_id": token_id}
        if self._wants_usage:
            chunk["usage"] = self._answer.usage_after(self._num_sent) if self._wants_usage_so_far else None
        return chunk

    def _prepared(self, index: int) -> tuple[bytes, bytes, bytes]:
        """A token's frame around its text and id; built once, since a step writes a frame for each request."""
        blank = {"index": index, "text": "\0", "logprobs": None, "finish_reason": None}
        before, _, rest = frame(to_json(self._chunk([blank], -1)), self._name("token")).rpartition(rb'"\u0000"')
        between, _, after = rest.partition(b"-1")
        return before, between, after

    def _name(self, event: str) -> str | None:
        return event if self._is_named else None
