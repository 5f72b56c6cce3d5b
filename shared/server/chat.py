"""``POST /v1/chat/completions``: OpenAI's chat API. Introduced in phase 4.

Prompts come from our own chat templates. Invariant: the deltas of a streamed answer, joined, equal the content of the
same answer in one body.
"""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from shared.engine.output import StepOutput
from shared.server.answer_stream import AnswerStream
from shared.server.completions import ANSWER, OPENAI_REASONS
from shared.server.errors import ApiError
from shared.server.event_stream import EventStreamResponse, WholeResponse
from shared.server.intake import Intake
from shared.server.logprobs import chat_logprobs, with_logprobs
from shared.server.middleware import record_of
from shared.server.protocol import ChatRequest
from shared.server.sse import DONE, frame, to_json
from shared.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions", response_class=Response, responses=ANSWER, summary="Answer a conversation")
async def answer(request: Request, body: ChatRequest) -> Response:
    """One JSON body, or with `stream` server-sent events without names, the last of which is `[DONE]`."""
    intake: Intake = request.app.state.intake
    record_of(request.scope).is_streaming = bool(body.stream)
    intake.check(body)
    thinking = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
    given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    stream = intake.submit(
        request,
        body,
        await intake.chat_ids(body.messages, thinking),
        param="messages",
        kind="chatcmpl",
        max_tokens=min(intake.config.max_chat_tokens, intake.max_seq_len) if given is None else given,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    chat = ChatFrames(stream, intake.config.model_name, intake.tokenizer, wants_usage=body.wants_usage)
    if body.stream:
        return EventStreamResponse(stream, intake.config, chat)
    return WholeResponse(stream, intake.config, chat.whole)


class ChatFrames:
    """Formats one answer, as frames of a stream or as one body.

    Args:
        wants_usage: add a last chunk with the usage and no choices; the others then hold ``"usage": null``.
    """

    def __init__(self, stream: AnswerStream, model_name: str, tokenizer: Tokenizer, *, wants_usage: bool) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._wants_usage = wants_usage
        self._head = {"id": stream.request_id, "created": int(time.time()), "model": model_name}

    def start(self) -> bytes:
        return self._frame({"role": "assistant", "content": ""})

    def tokens(self, outputs: Sequence[StepOutput]) -> bytes:
        return b"".join(
            self._frame({"content": output.text}, logprobs=self._logprobs([output]))
            for output in outputs
            if output.text or output.logprobs is not None
        )

    def end(self, stream: AnswerStream) -> bytes:
        assert stream.finish_reason is not None
        frames = self._frame({}, reason=OPENAI_REASONS[stream.finish_reason], stop=stream.stop)
        if self._wants_usage:
            frames += frame(to_json({**self._chunk(), "choices": [], "usage": stream.usage}))
        return frames + DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body()) + DONE

    def whole(self, outputs: list[StepOutput]) -> bytes:
        """The body of an answer that is not streamed."""
        stream = self._stream
        assert stream.finish_reason is not None
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(output.text for output in outputs), "refusal": None},
            "logprobs": self._logprobs(outputs),
            "finish_reason": OPENAI_REASONS[stream.finish_reason],
            "stop_reason": stream.stop,
        }
        return to_json({**self._head, "object": "chat.completion", "choices": [choice], "usage": stream.usage})

    def _chunk(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _frame(
        self, delta: dict[str, str], *, reason: str | None = None, stop: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = stop
        usage = {"usage": None} if self._wants_usage else {}
        return frame(to_json({**self._chunk(), "choices": [choice], **usage}))

    def _logprobs(self, outputs: Sequence[StepOutput]) -> dict[str, Any] | None:
        chosen = with_logprobs(outputs)
        return chat_logprobs(self._tokenizer, chosen) if chosen else None
