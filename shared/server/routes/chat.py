"""``POST /v1/chat/completions``: OpenAI's chat API. Introduced in phase 4.

Prompts come from our own chat templates. Invariant: the deltas of a streamed choice, joined, equal the content of the
same choice in one body.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from shared.engine.output import StepOutput
from shared.grammar.progress import Progress
from shared.grammar.tokens.fsm import TokenFSM
from shared.server.answers.answer import Answer
from shared.server.answers.answer_stream import AnswerStream
from shared.server.answers.intake import Intake
from shared.server.answers.logprobs import chat_logprobs, scored
from shared.server.answers.tool_answer import ToolAnswer, ToolReading, whole_message
from shared.server.bodies.protocol import ChatRequest
from shared.server.errors import ApiError
from shared.server.http.event_stream import EventStreamResponse, WholeResponse
from shared.server.http.middleware import record_of
from shared.server.http.sse import DONE, frame, to_json
from shared.server.routes.chunks import chat_context
from shared.server.routes.completions import ANSWER, OPENAI_REASONS, at_token
from shared.server.routes.segments import UNKNOWN
from shared.text.tokenizer import Tokenizer

router = APIRouter()


@router.post(
    "/v1/chat/completions", response_class=Response, responses={**ANSWER, **UNKNOWN}, summary="Answer a conversation"
)
async def answer(request: Request, body: ChatRequest) -> Response:
    """One JSON body, or with `stream` server-sent events without names, the last of which is `[DONE]`."""
    intake: Intake = request.app.state.intake
    record_of(request.scope).is_streaming = bool(body.stream)
    intake.check(body)
    older = intake.within_limit("max_tokens", body.max_tokens)
    max_tokens = intake.within_limit("max_completion_tokens", body.max_completion_tokens) or older
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = await intake.chat_prompt(body)
    if max_tokens is None:
        max_tokens = intake.within_room(intake.config.max_chat_tokens, len(prompt.ids))
    params = body.sampling_params(max_tokens, logprobs, defaults=intake.config.sampling_defaults)
    if body.enable_thinking is False and not prompt.is_thinking:
        params = replace(params, min_thinking_tokens=0)
    params = replace(params, prediction_ids=await intake.prediction_ids(body.prediction))
    params = await intake.with_grammar(params, intake.chat.grammar(body, prompt))
    watched = await intake.watched(params, body)
    segments = await chat_context(request, body)
    field = "chunks" if body.chunks else "segments"
    answer = intake.submit(request, body, [prompt.ids], params, kind="chatcmpl", segments=segments, segment_field=field)
    frames = ChatFrames(
        answer,
        intake.config.model_name,
        intake.tokenizer,
        wants_usage=body.wants_usage,
        wants_usage_so_far=body.wants_usage_so_far,
        num_top_logprobs=body.top_logprobs or 0,
        reading=intake.chat.reading(body, prompt),
        watched=watched,
    )
    if body.stream:
        return EventStreamResponse(answer, intake.config, frames)
    return WholeResponse(answer, intake.config, frames.whole)


class ChatFrames:
    """Formats one answer, as frames of a stream or as one body.

    Args:
        wants_usage: add a last chunk with the usage and no choices; the others then hold ``"usage": null``.
        wants_usage_so_far: with ``wants_usage``, the others hold the usage so far.
        num_top_logprobs: the most likely tokens of each position to show, if log-probabilities are requested.
        reading: how tool calls are read; None: all text is content.
        watched: the grammar whose state is added to each token's frame; every token then gets a frame.
    """

    def __init__(
        self,
        answer: Answer,
        model_name: str,
        tokenizer: Tokenizer,
        *,
        wants_usage: bool = False,
        wants_usage_so_far: bool = False,
        num_top_logprobs: int = 0,
        reading: ToolReading | None = None,
        watched: TokenFSM | None = None,
    ) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._wants_usage = wants_usage
        self._wants_usage_so_far = wants_usage_so_far
        self._num_top_logprobs = num_top_logprobs
        self._num_sent = 0  # tokens so far
        self._reading = reading
        self._readers = [None if reading is None else ToolAnswer(reading) for _ in answer.choices]
        self._progress = {} if watched is None else {choice: Progress(watched) for choice in answer.choices}
        self._head = {"id": answer.request_id, "created": int(time.time()), "model": model_name}
        self._parts = [self._prepared(choice.index) for choice in answer.choices]

    def start(self) -> bytes:
        return b"".join(
            self._frame(choice.index, {"role": "assistant", "content": ""}) for choice in self._answer.choices
        )

    def tokens(self, choice: AnswerStream, outputs: Sequence[StepOutput]) -> bytes:
        frames, reader = b"", self._readers[choice.index]
        before, after = self._parts[choice.index]
        is_text = reader is None and not self._progress and not self._wants_usage_so_far
        for output in outputs:
            self._num_sent += 1
            if is_text and output.logprobs is None:
                frames += b"%b%b%b" % (before, to_json(output.text), after) if output.text else b""
                continue
            deltas = reader.deltas(output) if reader else [{"content": output.text}] if output.text else []
            logprobs, extra = self._logprobs([output]), at_token(self._progress, choice, output)
            for delta in deltas or ([{"content": ""}] if logprobs or extra else []):
                frames += self._frame(choice.index, delta, logprobs=logprobs, extra=extra)
                logprobs, extra = None, {}
        return frames

    def finish(self, choice: AnswerStream) -> bytes:
        reader = self._readers[choice.index]
        deltas = reader.last_deltas(choice.finish_reason) if reader else []
        end = _end_of(choice, has_calls=reader is not None and reader.has_calls)
        return b"".join(self._frame(choice.index, delta) for delta in deltas) + self._frame(choice.index, {}, **end)

    def end(self) -> bytes:
        if not self._wants_usage:
            return DONE
        return frame(to_json({**self._chunk(), "choices": [], "usage": self._answer.usage})) + DONE

    def failure(self, error: ApiError) -> bytes:
        return frame(error.body()) + DONE

    def whole(self, outputs: Sequence[Sequence[StepOutput]]) -> bytes:
        """The body of an answer that is not streamed."""
        reading = self._reading
        messages = [
            {"content": "".join(output.text for output in own)} if reading is None else whole_message(reading, own)
            for own in outputs
        ]
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", **message, "refusal": None},
                "logprobs": self._logprobs(own),
                **_end_of(choice, has_calls="tool_calls" in message),
            }
            for choice, own, message in zip(self._answer.choices, outputs, messages, strict=True)
        ]
        return to_json({**self._head, "object": "chat.completion", "choices": choices, "usage": self._answer.usage})

    def _chunk(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _frame(
        self, index: int, delta: dict[str, Any], *, logprobs: Any = None, extra: Any = MappingProxyType({}), **end: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **end}
        chunk = {**self._chunk(), "choices": [choice], **extra}
        if self._wants_usage:
            chunk["usage"] = self._answer.usage_after(self._num_sent) if self._wants_usage_so_far else None
        return frame(to_json(chunk))

    def _prepared(self, index: int) -> tuple[bytes, bytes]:
        """A frame around its text; built once, since a step writes a frame for each request."""
        before, _, after = self._frame(index, {"content": "\0"}).partition(rb'"\u0000"')
        return before, after

    def _logprobs(self, outputs: Sequence[StepOutput]) -> dict[str, Any] | None:
        tokens = scored(outputs)
        return chat_logprobs(self._tokenizer, tokens, self._num_top_logprobs) if tokens else None


def _end_of(choice: AnswerStream, *, has_calls: bool) -> dict[str, Any]:
    assert choice.finish_reason is not None
    reason = OPENAI_REASONS[choice.finish_reason]
    return {"finish_reason": "tool_calls" if has_calls and reason == "stop" else reason, "stop_reason": choice.stop}
