"""Responses that watch for disconnects: streams and whole bodies. Introduced in phase 4.

The alternative, sse-starlette, opens a cancel scope around every frame, which measurably cost a third of the throughput
of 64 streams. Invariants: a client that disconnects ends its request, even in the queue or during prefill; so does a
client that does not read, whose connection is aborted after a limited time; however a response ends, an unfinished
request is aborted in the engine.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared.engine.output import StepOutput
from shared.server.answers.answer import Answer
from shared.server.answers.answer_stream import AnswerStream
from shared.server.errors import ApiError
from shared.server.http.connection import Connection
from shared.server.http.sse import COMMENT, DONE
from shared.server.settings import ServerConfig

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger("infer.server")


class Frames(Protocol):
    """Formats the events of one API; each method returns whole frames."""

    def start(self) -> bytes:
        """The frames before the first token."""

    def tokens(self, choice: AnswerStream, outputs: Sequence[StepOutput]) -> bytes:
        """One frame for each token of a choice; a token without text may have none."""

    def finish(self, choice: AnswerStream) -> bytes:
        """The frames that end one choice."""

    def end(self) -> bytes:
        """The frames that end a complete answer."""

    def failure(self, error: ApiError) -> bytes:
        """The frames that end an answer with an error."""


class AnswerResponse(Response, ABC):
    """The base class of both responses: runs ``respond`` and checks the client periodically, since a timer around every
    frame would cost more than the frame.
    """

    def __init__(self, answer: Answer, config: ServerConfig) -> None:
        super().__init__(media_type="application/json")
        self.answer = answer
        self.config = config
        self._last_sent = time.perf_counter()
        self._is_sending = False

    @abstractmethod
    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; cancelled when the client disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_watched(message: Message) -> None:
            self._last_sent, self._is_sending = time.perf_counter(), True
            await send(message)
            self._is_sending = False

        tasks = [asyncio.create_task(self.respond(scope, receive, send_watched))]
        tasks.append(asyncio.create_task(disconnection(receive)))
        period = min(self.config.send_timeout, self.config.keep_alive) / 4
        cause = "disconnected"
        try:
            while not (done := (await asyncio.wait(tasks, timeout=period, return_when=asyncio.FIRST_COMPLETED))[0]):
                seconds = time.perf_counter() - self._last_sent
                if self._is_sending and seconds > self.config.send_timeout:
                    cause = "slow_reader"
                    scope["state"]["transport"].abort()  # close() would wait for the reader
                elif not self._is_sending and seconds > self.config.keep_alive:
                    self.answer.nudge()
            if tasks[0] in done:
                tasks[0].result()
        except asyncio.CancelledError:
            cause = "shutting_down"
            raise
        finally:
            self.answer.cancel(cause)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class EventStreamResponse(AnswerResponse):
    """Sends the outputs of each step as server-sent events, in one part of the body.

    The task sends the first outputs and the end, and waits for a client that does not read; everything else is written
    as it arrives. The headers are held until the first outputs or comment, so an error before that gets its own status.
    """

    def __init__(self, answer: Answer, config: ServerConfig, frames: Frames) -> None:
        super().__init__(answer, config)
        self.frames = frames

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        is_started, is_open, is_chunked = False, True, scope["http_version"] != "1.0"
        while is_open:
            changed = await self.answer.take()
            is_open, error = self.answer.is_open, self.answer.error
            if not is_started and error is not None and not any(outputs for _, outputs in changed):
                await error.response(self.config)(scope, receive, send)
                return
            try:
                data = (b"" if is_started else self.frames.start()) + self._frames_of(changed)
            except Exception as bug:
                error, is_open = _failure(bug), False
                data = self.frames.failure(error)
            # the body ends with the connection, so only [DONE] shows that it is complete
            if error is not None and not is_chunked:
                data = data.removesuffix(DONE)
            if not is_started:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                is_started = True
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": is_open})
            if "connection" in scope["state"]:  # otherwise the application runs in another server
                self.answer.write = partial(self._write, scope["state"]["connection"], is_chunked)

    def _write(self, connection: Connection, is_chunked: bool, choice: AnswerStream) -> bool:
        """Write the outputs of an open choice directly if the client is reading: waking the task and its ``send`` would
        take as long as everything else that a token costs. See :class:`Answer`.
        """
        if not connection.is_writable:
            return False
        try:
            data = self.frames.tokens(choice, choice.take())
        except Exception as bug:
            choice.fail(_failure(bug))
        else:
            if data:  # an empty part would end the body
                connection.write_part(data, is_chunked=is_chunked)
                self._last_sent = time.perf_counter()
        return True

    def _frames_of(self, changed: list[tuple[AnswerStream, list[StepOutput]]]) -> bytes:
        """The frames of the outputs, and of the end if these are the last; without outputs, a keep-alive comment."""
        answer, frames = self.answer, self.frames
        data = b""
        for choice, outputs in changed:
            data += frames.tokens(choice, outputs)
            if not choice.is_open and answer.error is None:
                data += frames.finish(choice)
        if answer.is_open:
            return data if changed else COMMENT
        return data + (frames.end() if answer.error is None else frames.failure(answer.error))


class WholeResponse(AnswerResponse):
    """One JSON body, which ``body`` builds from all choices' outputs when the answer is complete."""

    def __init__(self, answer: Answer, config: ServerConfig, body: Callable[[list[list[StepOutput]]], bytes]) -> None:
        super().__init__(answer, config)
        self.make_body = body

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        outputs: list[list[StepOutput]] = [[] for _ in self.answer.choices]
        is_open = True
        while is_open:
            for choice, added in await self.answer.take():
                outputs[choice.index] += added
            is_open = self.answer.is_open
        if (error := self.answer.error) is not None:
            response = error.response(self.config)
        else:
            response = Response(self.make_body(outputs), media_type="application/json")
        await response(scope, receive, send)


def _failure(bug: Exception) -> ApiError:
    _log.error("a response could not be formatted", exc_info=bug)
    return ApiError(500, "internal_error", "The server failed; see its log.")


async def disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
