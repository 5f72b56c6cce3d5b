"""The loop that owns an engine: drain commands, run a step, publish outputs. Introduced in phase 4.

Commands and events are small picklable messages, so a thread and a process run the same loop. The server checks a
request before sending it, so a successful Add publishes no event. Invariants: a command takes effect between two steps,
and an event with the load follows; nothing else calls the engine; if a step raises, the last event is Crashed.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from shared.engine.memory_map import MemoryMap
from shared.engine.output import StepOutput, make_output
from shared.engine.record import EngineLoad
from shared.errors import InferError, RankError
from shared.sampling.params import SamplingParams
from shared.server.engine.served_engine import EngineFacts, ServedEngine
from shared.tracks.segments.inquiry import Inquiry

_log = logging.getLogger("infer.engine")


@dataclass(frozen=True)
class NewRequest:
    """A request in the form that the engine accepts."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    segment_ids: tuple[str, ...] = ()  # of phase 9.1; they precede the prompt
    num_segment_tokens: int = 0


@dataclass(frozen=True)
class Add:
    """Add requests to the engine's queue: all of them, or none if the engine refuses one."""

    requests: tuple[NewRequest, ...]


@dataclass(frozen=True)
class Abort:
    """Abort a request, if the engine has it."""

    request_id: str


class Question(StrEnum):
    """The queries that the loop answers between two steps."""

    DESCRIPTION = "description"
    MEMORY = "memory"


@dataclass(frozen=True)
class Ask:
    """Answer a query; the answer carries the same ``number``."""

    number: int
    question: Question | Inquiry


@dataclass(frozen=True)
class Stop:
    """End the loop."""


Command = Add | Abort | Ask | Stop


@dataclass(frozen=True)
class Refused:
    """The engine refused a request with ``refusal``, or raised an unexpected exception (None).

    This is rare: a preempted request has taken the queue's last slot, the segments and the prompt are too long
    together, or there is a bug.
    """

    request_id: str
    refusal: InferError | None


@dataclass(frozen=True)
class Idle:
    """The engine has no work; commands may have changed its load since the last event."""


@dataclass(frozen=True)
class Answered:
    """The answer to :class:`Ask`, or the reason that there is none: a refusal, or an unexpected exception as text."""

    number: int
    answer: Any
    failure: str | None = None
    refusal: InferError | None = None


@dataclass(frozen=True)
class Stepped:
    """The results of one step; ``started`` and ``ended`` are readings of ``time.perf_counter``."""

    started: float
    ended: float
    outputs: list[StepOutput]
    prefilled: tuple[str, ...]
    num_preempted: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the outputs by column: the engine waits for this, and pickling 64 outputs one by one takes four times
        as long."""
        columns = tuple(zip(*self.outputs, strict=True))
        return _stepped, (columns, self.started, self.ended, self.prefilled, self.num_preempted)


def _stepped(columns: Any, started: float, ended: float, prefilled: tuple[str, ...], num_preempted: int) -> Stepped:
    return Stepped(started, ended, list(map(make_output, zip(*columns, strict=True))), prefilled, num_preempted)


@dataclass(frozen=True)
class Crashed:
    """The loop has ended with the exception ``cause``; ``ends_server`` if a rank of the engine's group has failed
    (phase 12.1)."""

    cause: str
    ends_server: bool = False


Event = Refused | Idle | Answered | Stepped | Crashed
Publish = Callable[[Event, EngineLoad, int], None]
"""Takes an event, the load after it, and the number of requests that :class:`Add` commands have added so far."""


class Inbox(Protocol):
    """The source of commands; ``queue.SimpleQueue`` implements it."""

    def get(self, block: bool = True) -> Command:
        """The next command; raises ``queue.Empty`` if there is none and ``block`` is False."""


class EngineHandle(Protocol):
    """The loop as seen from the server, wherever it runs."""

    facts: EngineFacts
    tokenizer: Any

    def start(self, publish: Publish) -> None:
        """Start the loop; called on the event loop. Its events are passed to ``publish``, on any thread."""

    def send(self, command: Command) -> None:
        """Put a command into the loop's inbox without blocking."""

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the loop to end after :class:`Stop`."""

    @property
    def is_alive(self) -> bool: ...


class EngineLoop:
    """Owns ``engine`` while :meth:`run` runs."""

    def __init__(self, engine: ServedEngine, inbox: Inbox, publish: Publish) -> None:
        self._engine = engine
        self._inbox = inbox
        self._lock = threading.Lock()  # a rank may be lost while a step publishes its outputs
        self._publish_to = publish
        self._load = engine.load()
        self._num_added = 0

    def run(self) -> None:
        """Run until :class:`Stop`, or until a step raises an exception that is not due to a single request."""
        try:
            group = getattr(self._engine, "group", None)
            if group is not None:
                group.when_lost(self._crash)
            while self._drain_commands():
                if self._engine.has_work():
                    self._step()
                else:
                    self._publish(Idle())
        except BaseException as error:
            _log.critical("the engine loop crashed", exc_info=error)
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        is_rank = isinstance(error, RankError)
        cause = str(error) if is_rank else f"{type(error).__name__}: {error}"
        self._publish_with_load(Crashed(cause, is_rank), self._load, self._num_added)  # the last known load

    def _publish_with_load(self, event: Event, load: EngineLoad, num_added: int) -> None:
        with self._lock:
            self._publish_to(event, load, num_added)

    def _drain_commands(self) -> bool:
        """Execute all queued commands; if the engine has no work, block until the first arrives. False after
        :class:`Stop`."""
        block = not self._engine.has_work()
        try:
            while True:
                match self._inbox.get(block):
                    case Add() as command:
                        self._add(command)
                    case Abort(request_id):
                        self._engine.abort(request_id)
                    case Ask(number, question):
                        self._publish(self._answer(number, question))
                    case Stop():
                        return False
                block = False
        except queue.Empty:
            return True

    def _step(self) -> None:
        started = time.perf_counter()
        outputs = self._engine.step()
        ended = time.perf_counter()
        record = self._engine.last_step
        prefilled = tuple(request_id for request_id, _ in record.prefilled)
        self._publish(Stepped(started, ended, outputs, prefilled, len(record.preempted)))

    def _add(self, command: Add) -> None:
        self._num_added += len(command.requests)
        for position, new in enumerate(command.requests):
            refusal = self._refusal_of(new)
            if refusal is not None:
                for added in command.requests[:position]:
                    self._engine.abort(added.request_id)
                self._publish(refusal)
                return

    def _refusal_of(self, new: NewRequest) -> Refused | None:
        try:
            context = {"segment_ids": new.segment_ids} if new.segment_ids else {}
            self._engine.add_request(new.prompt_ids, new.params, new.request_id, **context)
        except InferError as refusal:
            return Refused(new.request_id, refusal)
        except Exception as bug:
            _log.error("request %s could not be added", new.request_id, exc_info=bug)
            return Refused(new.request_id, None)
        return None

    def _answer(self, number: int, question: Question | Inquiry) -> Answered:
        try:
            if not isinstance(question, Question):
                return Answered(number, question.answer(self._engine))
            if question is Question.MEMORY:
                return Answered(number, MemoryMap.of(self._engine.scheduler, self._engine.last_step))
            return Answered(number, self._description())
        except InferError as refusal:
            return Answered(number, None, refusal=refusal)
        except Exception as bug:
            _log.error("a question to the engine failed", exc_info=bug)
            return Answered(number, None, f"{type(bug).__name__}: {bug}")

    def _description(self) -> dict[str, Any]:
        """Load, statistics and last step; ``audit`` lists leaks and inconsistencies of the KV cache."""
        record = self._engine.last_step
        return {
            "load": dataclasses.asdict(self._engine.load()),
            "stats": self._engine.stats(),
            "last_step": None if record is None else dataclasses.asdict(record),
            "audit": [str(problem) for problem in self._engine.pool.audit()],
        }

    def _publish(self, event: Event) -> None:
        self._load = self._engine.load()
        self._publish_with_load(event, self._load, self._num_added)
