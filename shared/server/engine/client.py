"""The client of the engine loop: submits requests and routes their outputs to streams. Introduced in phase 4.

It runs on the event loop and never blocks. A request that the engine would refuse is refused here, based on the
engine's limits and its load as of the last event. So the engine itself refuses only after a race. Invariant: a
submitted request ends exactly once, even if the engine crashes.
"""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, cast

from shared.engine.memory_map import MemoryMap
from shared.engine.prompt import check_capacity, check_prompt, check_queue
from shared.engine.record import EngineLoad
from shared.errors import InferError
from shared.server.answers.answer import Answer
from shared.server.answers.answer_stream import AnswerStream
from shared.server.engine import loop as engine_loop
from shared.server.engine.loop import EngineHandle, Event, NewRequest, Question, Stepped
from shared.server.errors import ApiError, engine_failure, refusal_error
from shared.server.metrics import ServerMetrics
from shared.server.settings import ServerConfig
from shared.tracks.segments.inquiry import Inquiry

STOP_TIMEOUT = 10.0
"""Seconds that ``stop`` waits for the current step."""
_log = logging.getLogger("infer.engine")


class EngineClient:
    """Owns the open streams.

    ``load`` is the engine's load as of the last event, plus the requests submitted since, counted as waiting; ``crash``
    is the reason if the engine loop has crashed, and ``end_server`` is called if the server should stop as well.
    """

    def __init__(self, handle: EngineHandle, metrics: ServerMetrics, config: ServerConfig) -> None:
        self._handle = handle
        self._metrics = metrics
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, AnswerStream] = {}
        self._unflushed: dict[AnswerStream, None] = {}
        self._num_submitted = 0
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._is_stopped = False
        self.load = handle.facts.load
        self.crash: str | None = None
        self.end_server: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle.start(self._receive)

    async def stop(self) -> None:
        """End every open request with an error, and the engine loop once its current step is done."""
        self._is_stopped = True
        self.end_all(_stopped())
        self._handle.send(engine_loop.Stop())
        await asyncio.to_thread(self._handle.join, STOP_TIMEOUT)

    @property
    def is_alive(self) -> bool:
        return self._handle.is_alive and self.crash is None and not self._is_stopped

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    def submit(
        self, answer_id: str, requests: Sequence[NewRequest], *, n: int, param: str, segment_field: str | None = None
    ) -> Answer:
        """Submit one answer's requests to the engine; every ``n`` consecutive requests have the same prompt.

        ``param`` is the field of the body that holds the prompts, ``segment_field`` the one that names their segments.
        Raises ApiError, and submits nothing, if the engine would refuse one of them or has stopped.
        """
        if not self.is_alive:
            raise _stopped()
        facts = self._handle.facts
        try:
            for new in requests[::n]:
                check_prompt(new.prompt_ids, facts.model_config.vocab_size, facts.max_seq_len)
                num_prompt_tokens = new.num_segment_tokens + len(new.prompt_ids)
                check_capacity(num_prompt_tokens, new.params.max_new_tokens, facts.max_seq_len, facts.request_capacity)
            check_queue(self.load.num_waiting, facts.config.max_waiting_requests, len(requests))
        except InferError as refusal:
            raise self._error_of(refusal, param) from None
        choices = [
            AnswerStream(
                new.request_id,
                new.prompt_ids,
                index=index,
                param=param,
                segment_field=segment_field,
                max_unread_bytes=self._config.max_unread_bytes,
                num_segment_tokens=new.num_segment_tokens,
                abandon=self._abort,
            )
            for index, new in enumerate(requests)
        ]
        self._streams |= {choice.request_id: choice for choice in choices}
        self._num_submitted += len(choices)
        self.load = dataclasses.replace(self.load, num_waiting=self.load.num_waiting + len(choices))
        self._handle.send(engine_loop.Add(tuple(requests)))
        return Answer(answer_id, choices, n)

    def end_all(self, error: ApiError) -> None:
        """End every open request with an error."""
        for stream in list(self._streams.values()):
            stream.fail(error)

    async def describe(self) -> dict[str, Any]:
        """The engine's load, statistics and last step; ``audit`` lists leaks and inconsistencies of the KV cache."""
        return cast("dict[str, Any]", await self._ask(Question.DESCRIPTION))

    async def memory(self) -> MemoryMap:
        """Which request owns which KV cache block, between two steps."""
        return cast(MemoryMap, await self._ask(Question.MEMORY))

    async def inquire(self, inquiry: Inquiry, param: str) -> Any:
        """The answer to a message about segments; raises ApiError, naming ``param``, if it is refused."""
        try:
            return await self._ask(inquiry)
        except InferError as refusal:
            raise self._error_of(refusal, param) from None

    async def _ask(self, question: Question | Inquiry) -> Any:
        """The answer of the engine loop. Raises ApiError if the loop has stopped, or the engine's own refusal, an
        InferError."""
        if not self.is_alive:
            raise _stopped()
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._handle.send(engine_loop.Ask(number, question))
        try:
            return await answer
        finally:
            del self._questions[number]

    def _abort(self, request_id: str) -> None:
        """Abort a request whose stream was cancelled."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._metrics.on_end(stream)
            self._handle.send(engine_loop.Abort(request_id))

    def _receive(self, event: Event, load: EngineLoad, num_added: int) -> None:
        """Pass an event to the event loop; called on any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._handle_event, event, load, num_added)
        except RuntimeError:  # the event loop is closed, and so is every stream
            _log.debug("the event loop is closed")

    def _handle_event(self, event: Event, load: EngineLoad, num_added: int) -> None:
        num_unseen = self._num_submitted - num_added
        before = self.load
        num_queries = load.num_prefix_queries - before.num_prefix_queries
        self._metrics.on_prefix_lookups(num_queries, load.num_prefix_hits - before.num_prefix_hits)
        if load.num_drafts_by_position != before.num_drafts_by_position:
            num_drafts = map(sub, load.num_drafts_by_position, before.num_drafts_by_position)
            num_accepted = map(sub, load.num_accepted_by_position, before.num_accepted_by_position)
            self._metrics.on_drafts(list(num_drafts), list(num_accepted))
        self.load = dataclasses.replace(load, num_waiting=load.num_waiting + num_unseen)
        match event:
            case Stepped():
                # after the other events that have arrived, so that a stream is written only once
                if not self._unflushed:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._deliver(event)
            case engine_loop.Refused(request_id, refusal):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    known = None if refusal is None else self._error_of(refusal, *stream.fields)
                    stream.refuse(known or engine_failure(None))
            case engine_loop.Answered(number, answer, failure, refusal):
                asked = self._questions.get(number)
                if asked is not None and not asked.done():  # otherwise the HTTP request that asked has already ended
                    error = refusal or (None if failure is None else engine_failure(failure))
                    asked.set_result(answer) if error is None else asked.set_exception(error)
            case engine_loop.Crashed(cause, ends_server):
                if not self._is_stopped:
                    self._crashed(cause)
                    if ends_server:
                        self.end_server()
            case engine_loop.Idle():
                pass

    def _error_of(self, refusal: InferError, param: str, segment_field: str | None = None) -> ApiError:
        retry_after = self._config.retry_after
        return refusal_error(refusal, param=param, retry_after=retry_after, segment_field=segment_field)

    def _deliver(self, step: Stepped) -> None:
        self._metrics.on_preemptions(step.num_preempted)
        for request_id in step.prefilled:
            stream = self._streams.get(request_id)
            if stream is not None and stream.scheduled is None:  # otherwise it is prefilled again after a preemption
                stream.scheduled = step.started
        gaps: dict[float, int] = {}
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # cancelled while the step ran
                continue
            before = stream.last_token
            stream.push(output, step.ended)
            if output.token_id is not None:
                if before is None:
                    self._metrics.on_first_token(stream)
                else:
                    gap = step.ended - before
                    gaps[gap] = gaps.get(gap, 0) + 1
            if stream.is_open:
                self._unflushed[stream] = None
            elif self._streams.pop(output.request_id, None) is not None:
                self._metrics.on_end(stream)
        self._metrics.on_gaps(gaps)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, {}
        for stream in unflushed:
            stream.flush()

    def _crashed(self, cause: str) -> None:
        """End every open request with an error; a stopped engine has no load."""
        self.crash = self.crash or cause  # the engine process ends because a step failed; its end is not the cause
        self.load = dataclasses.replace(self.load, num_running=0, num_waiting=0, kv_usage=0.0)
        error = ApiError(500, "engine_error", "The engine has stopped after an error; see the server's log.")
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.refuse(error)
            self._metrics.on_end(stream)
        for asked in self._questions.values():
            if not asked.done():
                asked.set_exception(error)


def _stopped() -> ApiError:
    return ApiError(503, "engine_stopped", "The engine has stopped, so this server takes no requests; restart it.")
