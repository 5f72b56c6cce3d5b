"""Turns a validated body into a request in the engine. Introduced in phase 4.

Tokenization runs on two threads, because a long prompt would block the event loop; one is for short texts, so that they
do not wait for long ones. A text that no sequence can hold is refused before it is tokenized. Invariant: every refusal
of the engine or the tokenizer becomes a 422 or a 503 that names the field.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request

from shared.engine.prompt import check_length
from shared.errors import ModelFolderError, RequestError
from shared.server.answer_stream import AnswerStream
from shared.server.engine_client import EngineClient
from shared.server.engine_loop import EngineHandle
from shared.server.errors import ApiError, invalid, overloaded
from shared.server.middleware import record_of
from shared.server.protocol import Message, SamplingFields
from shared.server.settings import ServerConfig
from shared.text.chat import ChatMessage, chat_parts, choose_template
from shared.text.token_length import TextBound

_LONG = 2**14  # characters


class Intake:
    """Tokenizes and submits the requests of one engine."""

    def __init__(self, handle: EngineHandle, client: EngineClient, config: ServerConfig) -> None:
        self.tokenizer = handle.tokenizer
        self.max_seq_len = handle.max_seq_len
        self.config = config
        self.is_draining = False
        self._client = client
        self._bound = TextBound.of(handle.tokenizer)
        self._short_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer of long texts")
        self._template: str | None = None
        with contextlib.suppress(ModelFolderError):
            self._template = choose_template(handle.model_config.family, handle.tokenizer)

    async def text_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt

        def encode() -> list[int]:
            check_length(self._bound.least_tokens(prompt), self.max_seq_len)
            return self.tokenizer.encode(prompt)

        return await self._encode("prompt", len(prompt), encode)

    async def chat_ids(self, messages: list[Message], thinking: bool | None) -> list[int]:
        template = self._template
        if template is None:
            name = self.config.model_name
            raise invalid(f"The model {name} has no chat template here; use /v1/completions.", param="model")
        turns = [ChatMessage(message.role, message.content) for message in messages]

        def encode() -> list[int]:
            parts = chat_parts(self.tokenizer, turns, template=template, thinking=thinking)
            check_length(self._bound.least_tokens("".join(parts)), self.max_seq_len)
            return [index for part in parts for index in self.tokenizer.encode(part, add_special_tokens=False)]

        return await self._encode("messages", sum(len(turn.content) for turn in turns), encode)

    def submit(
        self,
        request: Request,
        body: SamplingFields,
        prompt_ids: list[int],
        *,
        param: str,
        kind: str,
        max_tokens: int,
        logprobs: int | None,
    ) -> AnswerStream:
        """Submit a request. ``param`` is the field of the body with the prompt; ``kind`` is the prefix of the id."""
        if max_tokens > self.max_seq_len:
            field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            raise invalid(
                f"{field} is {max_tokens}; this server allows at most {self.max_seq_len} tokens for prompt and answer "
                "together.",
                param=field,
            )
        params = body.sampling_params(max_tokens, logprobs)
        stream = self._client.submit(f"{kind}-{uuid.uuid4().hex}", prompt_ids, params, param=param)
        record_of(request.scope).stream = stream
        return stream

    def check(self, body: SamplingFields) -> None:
        """Raise ApiError for another model's name, and for every request while the server shuts down."""
        if (stopping := self.stopping()) is not None:
            raise stopping
        if body.model != self.config.model_name:
            raise invalid(
                f"model is {body.model[:80]!r}; this server serves {self.config.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    def stopping(self) -> ApiError | None:
        """The error for every new request while the server shuts down."""
        if not self.is_draining:
            return None
        return overloaded("The server is shutting down.", self.config.retry_after, code="shutting_down")

    def close(self) -> None:
        for thread in (self._short_texts, self._long_texts):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, param: str, num_characters: int, encode: Callable[[], list[int]]) -> list[int]:
        thread = self._long_texts if num_characters > _LONG else self._short_texts
        try:
            ids = await asyncio.get_running_loop().run_in_executor(thread, encode)
        except RequestError as error:
            raise invalid(str(error), param=param) from None
        return ids
