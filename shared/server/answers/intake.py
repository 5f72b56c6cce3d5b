"""Turns a validated body into a request in the engine. Introduced in phase 4.

Tokenization runs on two threads: a long prompt would block the event loop, and short texts should not wait for long
ones. A text that no sequence can hold is refused before it is tokenized. Invariant: every refusal by the engine or the
tokenizer becomes a 422 or a 503 that names the field.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import TypeVar

from starlette.requests import Request

from shared.engine.prompt import check_length
from shared.errors import RequestError
from shared.grammar.automata.automaton import Automaton
from shared.grammar.cache import GrammarCache
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError, Limits
from shared.grammar.tokens.fsm import FSMCompiler, TokenFSM
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.sampling.params import SamplingParams
from shared.server.answers.answer import Answer
from shared.server.answers.served_chat import ChatPrompt, ServedChat
from shared.server.bodies.protocol import ChatRequest, Prediction, SamplingFields
from shared.server.bodies.structured_output import refusal
from shared.server.engine.client import EngineClient
from shared.server.engine.grammar_process import GrammarProcess
from shared.server.engine.loop import EngineHandle, NewRequest
from shared.server.errors import ApiError, invalid, overloaded, refusal_error, unsupported
from shared.server.http.middleware import record_of
from shared.server.settings import ServerConfig
from shared.text.token_length import TextBound
from shared.tracks.segments.inquiry import SegmentInfo

Encoded = TypeVar("Encoded")
_LONG = 2**14  # characters
_WAITING = 256  # maximum concurrent requests that wait for a grammar


class Intake:
    """Tokenizes and submits the requests of one engine."""

    def __init__(self, handle: EngineHandle, client: EngineClient, config: ServerConfig) -> None:
        self.tokenizer = handle.tokenizer
        self.facts = handle.facts
        self.vocab_size: int = handle.facts.model_config.vocab_size
        self.config = config
        self.is_draining = False
        self._client = client
        self._bound = TextBound.of(handle.tokenizer)
        self._short_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer of long texts")
        self._waiting = ThreadPoolExecutor(_WAITING, thread_name_prefix="waiting for a grammar")
        self._compiler = GrammarProcess()
        self._grammars: GrammarCache[Grammar] = GrammarCache(self._compiled, lambda each: _automaton(each).num_bytes)
        self._watched: GrammarCache[TokenFSM] = GrammarCache(self._over_tokens, lambda fsm: fsm.masks.cache_bytes)
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_lock = Lock()
        self.chat = ServedChat(handle, config)

    def start(self) -> None:
        """Starts slow preparations before the first request needs them."""
        if self.facts.has_grammars:
            self._compiler.start()
            self._waiting.submit(self._words)

    async def text_ids(
        self, prompt: str | list[int], add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        if not isinstance(prompt, str):
            return prompt

        def encode() -> list[int]:
            check_length(self._bound.least_tokens(prompt), self.facts.max_seq_len)
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return await self._encode(param, len(prompt), encode)

    async def chat_prompt(self, body: ChatRequest) -> ChatPrompt:
        """The prompt of a conversation. Raises ApiError."""
        turns = self.chat.turns(body)

        def encode() -> ChatPrompt:
            return self.chat.prompt(
                body, turns, lambda text: check_length(self._bound.least_tokens(text), self.facts.max_seq_len)
            )

        arguments = (call.arguments for turn in turns for call in turn.tool_calls)
        written = [*(turn.content for turn in turns), *arguments, *map(str, body.definitions)]
        return await self._encode("messages", sum(map(len, written)), encode)

    async def prediction_ids(self, prediction: Prediction | None) -> tuple[int, ...]:
        """The tokens of a predicted answer; raises ApiError if no answer can be that long."""
        if prediction is None:
            return ()
        text: str = prediction.content

        most = self.facts.max_seq_len - 1

        def check(least_tokens: int) -> None:
            if least_tokens > most:
                raise RequestError(
                    f"prediction.content has at least {least_tokens} tokens; it may have at most {most}, since no "
                    "answer of this server is longer: shorten it."
                )

        def encode() -> list[int]:
            check(self._bound.least_tokens(text))
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            check(len(ids))
            return ids

        return tuple(await self._encode("prediction.content", len(text), encode))

    async def with_grammar(self, params: SamplingParams, described: tuple[Grammar, str] | None) -> SamplingParams:
        """The parameters with a field's grammar, compiled. A request waits for its own grammar, and delays no other
        request."""
        if described is None:
            return params
        grammar, param = described
        if not self.facts.has_grammars:
            said = f"{param} asks for a grammar, and phase 12 is the first whose engine has them: leave it out."
            raise unsupported(said, param=param)
        try:
            compiled = self._grammars.known(grammar)
            if compiled is None:
                loop = asyncio.get_running_loop()
                compiled = await loop.run_in_executor(self._waiting, self._grammars.get, grammar)
            return replace(params, structured_output=compiled)
        except GrammarError as error:
            raise refusal(error, param) from None
        except RequestError as error:
            raise invalid(str(error), param="ignore_eos") from None

    async def watched(self, params: SamplingParams, body: SamplingFields) -> TokenFSM | None:
        """The grammar over tokens with which to follow each answer, if the body requests that.

        Call it after ``with_grammar``. Each token is then read on the event loop, which takes 0.01 ms, or 3 ms if no
        mask is cached.
        """
        grammar = params.structured_output
        if not body.grammar_progress or not isinstance(grammar, Grammar):
            return None
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self._watched.get, grammar)

    def _compiled(self, grammar: Grammar) -> Grammar:
        return self._compiler.compile(grammar, self._words().usable_bytes)

    def _over_tokens(self, grammar: Grammar) -> TokenFSM:
        return FSMCompiler(self._words(), Limits()).compile(grammar)

    def _words(self) -> GrammarVocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary.of(self.tokenizer, self.vocab_size)
            return self._vocabulary

    def within_limit(self, field: str, max_tokens: int | None) -> int | None:
        """The value of a field that limits the answer; raises ApiError if no sequence can be that long."""
        most = self.facts.max_seq_len
        if max_tokens is not None and max_tokens > most:
            said = f"{field} is {max_tokens}; this server allows at most {most} tokens for prompt and answer together."
            raise invalid(said, param=field)
        return max_tokens

    def within_room(self, most: int | None, num_prompt_tokens: int) -> int:
        """The maximum tokens of an answer whose request sets no limit: ``most``, or all that fit after the prompt."""
        room = max(1, min(self.facts.max_seq_len, self.facts.request_capacity) - num_prompt_tokens)
        return room if most is None else min(most, room)

    def submit(
        self,
        request: Request,
        body: SamplingFields,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        kind: str,
        segments: Sequence[SegmentInfo] = (),
        segment_field: str | None = None,
    ) -> Answer:
        """Submit ``n`` requests for each prompt, after its ``segments``, all or none; ``kind`` is the prefix of the id.

        The first answer to a prompt has the seed of the request; the others have seeds derived from it.
        """
        num_choices = body.num_answers * len(prompts)
        try:
            params.check_token_ids(self.vocab_size)
        except RequestError as error:
            raise invalid(str(error), param=str(error).partition(" ")[0]) from None  # the message begins with the field
        answer_id = f"{kind}-{uuid.uuid4().hex}"
        seeds = [derived_seed(params.seed, index) for index in range(body.num_answers)]
        sampled = [replace(params, seed=seed) for seed in seeds]
        context = tuple(segment.segment_id for segment in segments), sum(segment.num_tokens for segment in segments)
        requests = [
            NewRequest(f"{answer_id}-{p}-{i}" if num_choices > 1 else answer_id, prompt_ids, sampled[i], *context)
            for p, prompt_ids in enumerate(prompts)
            for i in range(body.num_answers)
        ]
        answer = self._client.submit(
            answer_id, requests, n=body.num_answers, param=body.prompt_field, segment_field=segment_field
        )
        record_of(request.scope).answer = answer
        return answer

    def check(self, body: SamplingFields) -> None:
        """Raise ApiError for another model's name, for thinking limits that this server cannot enforce, and for every
        request while the server shuts down.
        """
        self.check_model(body.model)
        limits = {"thinking_budget": body.thinking_budget, "min_thinking_tokens": body.min_thinking_tokens or None}
        for field, value in limits.items():
            if value is not None and not self.facts.limits_thinking:
                said = "leave it out: phase 11.1 limits thinking, of models whose tokenizer has </think>."
                raise unsupported(f"{field} is {value}; {said}", param=field)

    def check_model(self, name: str) -> None:
        """Raise ApiError for another model's name, and for every request while the server shuts down."""
        if (stopping := self.stopping()) is not None:
            raise stopping
        if name != self.config.model_name:
            said = f"model is {name[:80]!r}; this server serves {self.config.model_name!r}."
            raise invalid(said, param="model", code="model_not_found")

    def stopping(self) -> ApiError | None:
        """The error for every new request while the server shuts down."""
        if not self.is_draining:
            return None
        return overloaded("The server is shutting down.", self.config.retry_after, code="shutting_down")

    def close(self) -> None:
        for thread in (self._short_texts, self._long_texts, self._waiting):
            thread.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

    async def _encode(self, param: str, num_characters: int, encode: Callable[[], Encoded]) -> Encoded:
        thread = self._long_texts if num_characters > _LONG else self._short_texts
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, encode)
        except RequestError as error:
            raise refusal_error(error, param=param, retry_after=self.config.retry_after) from None


def _automaton(grammar: Grammar) -> Automaton:
    assert grammar.automaton is not None
    return grammar.automaton


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of the answer with this index, among those to one prompt.

    The stride is 2**64 over the golden ratio, so that requests with adjacent seeds share no seed.
    """
    return None if seed is None else (seed + index * 0x9E3779B97F4A7C15) % 2**64
