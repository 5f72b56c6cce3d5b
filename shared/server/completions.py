"""``POST /v1/completions``: continue a text, token by token. Introduced in phase 4.

The response is always a stream of the events ``token``, ``done`` and ``error``. The data of each is also a chunk of
OpenAI's ``text_completion``, so OpenAI's clients can read the stream. Invariants: one ``token`` event for each
generated token, in order, an end-of-sequence token included; then exactly one ``done`` or ``error``.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from shared.engine.output import StepOutput
from shared.server.answer_stream import AnswerStream
from shared.server.errors import ApiError
from shared.server.event_stream import EventStreamResponse
from shared.server.intake import Intake
from shared.server.logprobs import completion_logprobs, with_logprobs
from shared.server.middleware import record_of
from shared.server.protocol import CompletionRequest
from shared.server.sse import DONE, frame, to_json
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

OPENAI_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's ``finish_reason`` for each way in which generation ends by itself."""

router = APIRouter()
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "the events token, done and error", "content": {"text/event-stream": {}}}
}


@router.post("/v1/completions", response_class=Response, responses=_STREAM, summary="Continue a text, as a stream")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Server-sent events `token`, `done` and `error`; `stream` is always treated as true."""
    intake: Intake = request.app.state.intake
    record_of(request.scope).is_streaming = True
    intake.check(body)
    stream = intake.submit(
        request,
        body,
        await intake.text_ids(body.prompt),
        param="prompt",
        kind="cmpl",
        max_tokens=intake.config.max_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
    )
    frames = CompletionFrames(
        stream.request_id,
        intake.config.model_name,
        intake.tokenizer,
        is_plain=intake.config.plain_events,
        wants_usage=body.wants_usage,
    )
    return EventStreamResponse(stream, intake.config, frames)


class CompletionFrames:
    """Formats one answer as frames.

    Args:
        is_plain: exactly as OpenAI does it: no event names, at the end a chunk with the usage if ``wants_usage``, then
            ``[DONE]``.
    """

    def __init__(
        self, request_id: str, model_name: str, tokenizer: Tokenizer, *, is_plain: bool, wants_usage: bool
    ) -> None:
        self._head = {"id": request_id, "object": "text_completion", "created": int(time.time()), "model": model_name}
        self._tokenizer = tokenizer
        self._is_plain = is_plain
        self._wants_usage = wants_usage
        self._length = 0  # characters of the answer so far
        # A token's frame without the text and the id: prepared once, since a step writes a frame for each request.
        blank = self._chunk("\0", None, token_id=-1)
        self._before, _, rest = frame(to_json(blank), self._name("token")).rpartition(rb'"\u0000"')
        self._between = rest.partition(b"-1}")[0]

    def start(self) -> bytes:
        return b""

    def tokens(self, outputs: Sequence[StepOutput]) -> bytes:
        return b"".join(map(self._token, outputs))

    def end(self, stream: AnswerStream) -> bytes:
        assert stream.finish_reason is not None
        done = self._chunk("", OPENAI_REASONS[stream.finish_reason], token_id=None, stop=stream.stop)
        frames = frame(to_json({**done, "usage": stream.usage}), self._name("done"))
        if self._is_plain:
            if self._wants_usage:
                frames += frame(to_json({**self._head, "choices": [], "usage": stream.usage}))
            frames += DONE
        return frames

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body(), self._name("error")) + (DONE if self._is_plain else b"")

    def _token(self, output: StepOutput) -> bytes:
        assert output.token_id is not None
        if output.logprobs is None:
            text = json.dumps(output.text, ensure_ascii=False).encode()
            return b"%b%b%b%d}\n\n" % (self._before, text, self._between, output.token_id)
        logprobs = completion_logprobs(self._tokenizer, with_logprobs([output]), self._length)
        self._length += len(output.text)
        chunk = self._chunk(output.text, None, token_id=output.token_id, logprobs=logprobs)
        return frame(to_json(chunk), self._name("token"))

    def _chunk(
        self, text: str, reason: str | None, *, token_id: int | None, stop: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = stop
        return {**self._head, "choices": [choice], "token_id": token_id}

    def _name(self, event: str) -> str | None:
        return None if self._is_plain else event
