"""``POST /v1/completions``: continue a text. Introduced in phase 4.

The response is one JSON body, a stream of OpenAI's unnamed frames, or a stream of the named events ``token``, ``done``
and ``error``. Invariants of both streams: one frame for each generated token, in order, an end-of-sequence token
included, and its data is a chunk of OpenAI's ``text_completion``; named events end with exactly one ``done`` or
``error``, unnamed frames with ``[DONE]``.
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
from shared.server.event_stream import EventStreamResponse, WholeResponse
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
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "one body, or a stream", "content": {"application/json": {}, "text/event-stream": {}}}
}
"""The successful responses of both routes, for the OpenAPI schema."""


@router.post("/v1/completions", response_class=Response, responses=ANSWER, summary="Continue a text")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """One JSON body, or with `stream` server-sent events without names, the last of which is `[DONE]`.

    A request without `stream` whose `Accept` names `text/event-stream` gets the events `token`, `done` and `error`.
    """
    intake: Intake = request.app.state.intake
    is_named = intake.config.named_events or (body.stream is None and accepts_events(request))
    record_of(request.scope).is_streaming = is_streaming = is_named or bool(body.stream)
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
        stream, intake.config.model_name, intake.tokenizer, is_named=is_named, wants_usage=body.wants_usage
    )
    if is_streaming:
        return EventStreamResponse(stream, intake.config, frames)
    return WholeResponse(stream, intake.config, frames.whole)


def accepts_events(request: Request) -> bool:
    """Whether the header `Accept` names `text/event-stream`; a wildcard does not."""
    kinds = (kind.partition(";")[0].strip().lower() for kind in request.headers.get("accept", "").split(","))
    return "text/event-stream" in kinds


class CompletionFrames:
    """Formats one answer, as frames of a stream or as one body.

    Args:
        is_named: frames are the events ``token``, ``done`` (with the usage) and ``error``; else OpenAI's, which have no
            names and end with ``[DONE]``.
        wants_usage: add a last chunk with the usage and no choices; the others then hold ``"usage": null``. Without
            effect on named events.
    """

    def __init__(
        self, stream: AnswerStream, model_name: str, tokenizer: Tokenizer, *, is_named: bool, wants_usage: bool
    ) -> None:
        created = int(time.time())
        self._head = {"id": stream.request_id, "object": "text_completion", "created": created, "model": model_name}
        self._stream = stream
        self._tokenizer = tokenizer
        self._is_named = is_named
        self._wants_usage = wants_usage and not is_named
        self._length = 0  # characters of the answer so far
        # A token's frame without the text and the id: prepared once, since a step writes a frame for each request.
        blank = self._chunk("\0", None, token_id=-1)
        self._before, _, rest = frame(to_json(blank), self._name("token")).rpartition(rb'"\u0000"')
        self._between, _, self._after = rest.rpartition(b"-1")

    def start(self) -> bytes:
        return b""

    def tokens(self, outputs: Sequence[StepOutput]) -> bytes:
        return b"".join(map(self._token, outputs))

    def end(self, stream: AnswerStream) -> bytes:
        assert stream.finish_reason is not None
        done = self._chunk("", OPENAI_REASONS[stream.finish_reason], token_id=None, stop=stream.stop)
        if self._is_named:
            return frame(to_json({**done, "usage": stream.usage}), "done")
        frames = frame(to_json(done))
        if self._wants_usage:
            frames += frame(to_json({**self._head, "choices": [], "usage": stream.usage}))
        return frames + DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body(), self._name("error")) + (b"" if self._is_named else DONE)

    def whole(self, outputs: list[StepOutput]) -> bytes:
        """The body of an answer that is not streamed."""
        stream, chosen = self._stream, with_logprobs(outputs)
        assert stream.finish_reason is not None
        choice = {
            "index": 0,
            "text": "".join(output.text for output in outputs),
            "logprobs": completion_logprobs(self._tokenizer, chosen, 0) if chosen else None,
            "finish_reason": OPENAI_REASONS[stream.finish_reason],
            "stop_reason": stream.stop,
        }
        return to_json({**self._head, "choices": [choice], "usage": stream.usage})

    def _token(self, output: StepOutput) -> bytes:
        assert output.token_id is not None
        if output.logprobs is None:
            text = json.dumps(output.text, ensure_ascii=False).encode()
            return b"%b%b%b%d%b" % (self._before, text, self._between, output.token_id, self._after)
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
        usage = {"usage": None} if self._wants_usage else {}
        return {**self._head, "choices": [choice], "token_id": token_id, **usage}

    def _name(self, event: str) -> str | None:
        return event if self._is_named else None
