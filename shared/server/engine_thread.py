"""The engine on a thread of its own. Introduced in phase 4.

A step takes as long as it takes; on the event loop it would delay every other client's bytes and every health check. So
one thread owns the engine and does nothing but obey commands and step. Commands reach it through an inbox; what a step
yields goes back to the event loop in one call. Invariants: nobody else touches the engine once the thread runs; a
command takes effect between two steps; a request that was submitted ends exactly once, even if the thread dies.
"""

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.engine.memory_map import MemoryMap
from shared.engine.output import StepOutput
from shared.errors import InferError, QueueFullError
from shared.sampling.params import SamplingParams
from shared.server.answer_stream import AnswerStream
from shared.server.errors import ApiError, engine_failure
from shared.server.served_engine import Observer, ServedEngine
from shared.text.stopping import FinishReason

STOP_TIMEOUT = 10.0
"""Seconds that stopping waits for the step that runs."""
_log = logging.getLogger("infer.engine")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StepReport:
    """What one step did, and when."""

    started: float
    ended: float
    outputs: list[StepOutput]
    prefilled: tuple[str, ...]
    num_preempted: int


class EngineThread:
    """Owns an engine.

    Args:
        max_open_requests: more are refused at once, without waiting for the step that runs.
    """

    def __init__(
        self, engine: ServedEngine, observer: Observer, *, max_open_requests: int, max_unread_bytes: int
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._max_open_requests = max_open_requests
        self._max_unread_bytes = max_unread_bytes
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, AnswerStream] = {}
        self._admissions: dict[str, asyncio.Future[None]] = {}
        self._is_stopped = False
        self.load = engine.load()
        self.crash: BaseException | None = None

    # On the event loop.

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that runs; open requests end with an error."""
        self._is_stopped = True
        self.end_all(_stopped())
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.crash is None and not self._is_stopped

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    async def submit(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> AnswerStream:
        """Hand a request to the engine, and wait until it has taken it.

        Raises RequestError, QueueFullError and CapacityError as the engine does, and ApiError when there is none.
        """
        if not self.is_alive:
            raise _stopped()
        if len(self._streams) >= self._max_open_requests:
            raise QueueFullError(f"{len(self._streams)} requests are open, as many as this server takes; try later.")
        stream = AnswerStream(
            request_id, len(prompt_ids), max_unread_bytes=self._max_unread_bytes, abandon=self._forget
        )
        admission = asyncio.get_running_loop().create_future()
        self._streams[request_id] = stream
        self._admissions[request_id] = admission
        self._inbox.put(lambda: self._add(request_id, prompt_ids, params))
        try:
            await admission
        except asyncio.CancelledError:
            stream.cancel("disconnected")
            raise
        except BaseException:
            self._streams.pop(request_id, None)
            raise
        finally:
            self._admissions.pop(request_id, None)
        return stream

    def end_all(self, error: ApiError) -> None:
        """End every open request with an error."""
        for admission in list(self._admissions.values()):
            if not admission.done():
                admission.set_exception(error)
        for stream in list(self._streams.values()):
            stream.fail(error)

    async def describe(self) -> dict[str, Any]:
        """What the engine says of itself between two steps; ``audit`` lists what its memory holds or has wrong."""
        return await self._ask(self._description)

    async def memory(self) -> MemoryMap:
        """Which block of the memory belongs to whom between two steps."""
        return await self._ask(lambda: MemoryMap.of(self._engine.scheduler, self._engine.last_step))

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        """What the engine's thread answers between two steps; raises ApiError when there is none."""
        if not self.is_alive:
            raise _stopped()
        answer: Future[Answer] = Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # who asked waits no more
            try:
                answer.set_result(question())
            except Exception as bug:
                answer.set_exception(bug)

        self._inbox.put(reply)
        return await asyncio.wrap_future(answer)

    def _forget(self, request_id: str) -> None:
        """The stream of this request was cancelled."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._observer.on_end(stream)
            self._inbox.put(lambda: self._abort(request_id))

    def _admitted(self, request_id: str, error: Exception | None) -> None:
        admission = self._admissions.get(request_id)
        if admission is not None and not admission.done():
            admission.set_result(None) if error is None else admission.set_exception(error)

    def _deliver(self, report: StepReport) -> None:
        self._observer.on_preemptions(report.num_preempted)
        for request_id in report.prefilled:
            stream = self._streams.get(request_id)
            if stream is not None and stream.scheduled is None:  # else it was preempted, and is prefilled again
                stream.scheduled = report.started
        for output in report.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # cancelled while the step ran
                continue
            before = stream.last_token
            stream.push(output, report.ended)
            if output.token_id is not None:
                if before is None:
                    self._observer.on_first_token(stream)
                else:
                    self._observer.on_token(report.ended - before)
            if not stream.is_open and self._streams.pop(output.request_id, None) is not None:
                self._observer.on_end(stream)

    def _crashed(self) -> None:
        error = ApiError(500, "engine_error", "The engine has stopped after a failure; the server's log says why.")
        self.end_all(error)

    # On the engine's thread.

    def _description(self) -> dict[str, Any]:
        record = self._engine.last_step
        return {
            "load": dataclasses.asdict(self._engine.load()),
            "stats": self._engine.stats(),
            "last_step": None if record is None else dataclasses.asdict(record),
            "audit": [str(problem) for problem in self._engine.pool.audit()],
        }

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work():
                    self._step()
                self.load = self._engine.load()
        except BaseException as error:
            self.crash = error
            _log.critical("the engine's thread died", exc_info=error)
            self._call(self._crashed)

    def _obey(self) -> bool:
        """Run the commands that wait, or wait for one where there is nothing else to do; False to end."""
        try:
            while True:
                command = self._inbox.get(block=not self._engine.has_work())
                if command is None:
                    return False
                command()
                self.load = self._engine.load()
        except queue.Empty:
            return True

    def _step(self) -> None:
        started = time.perf_counter()
        outputs = self._engine.step()
        ended = time.perf_counter()
        self.load = self._engine.load()
        record = self._engine.last_step
        assert record is not None
        prefilled = tuple(request_id for request_id, _ in record.prefilled)
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                _log.error("request %s failed: %s", output.request_id, output.error)
        self._call(self._deliver, StepReport(started, ended, outputs, prefilled, len(record.preempted)))

    def _add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        error: Exception | None = None
        try:
            self._engine.add_request(prompt_ids, params, request_id)
        except InferError as refusal:
            error = refusal
        except Exception as bug:
            _log.error("request %s could not be added", request_id, exc_info=bug)
            error = engine_failure(None)
        self._call(self._admitted, request_id, error)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed; nobody is left to be told
            _log.debug("the event loop is closed")


def _stopped() -> ApiError:
    return ApiError(503, "engine_stopped", "The engine has stopped; this server answers no more requests.")
