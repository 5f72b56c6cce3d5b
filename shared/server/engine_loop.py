"""The loop that owns an engine: obey what has come, step, tell. Introduced in phase 4.

It runs on a thread or in a process of its own (:mod:`shared.server.engine_thread`, :mod:`shared.server.engine_process`)
and is the same in both: what goes in and out are small messages that could be pickled. The server checks a request
before it sends it, so an Add that succeeds has no event of its own. Invariants: a command takes effect between two
steps, and an event with the load follows it; nothing else enters the engine; an exception of a step is the last event.
"""

import dataclasses
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from shared.engine.memory_map import MemoryMap
from shared.engine.output import StepOutput
from shared.engine.record import EngineLoad
from shared.errors import InferError
from shared.sampling.params import SamplingParams
from shared.server.served_engine import ServedEngine

_log = logging.getLogger("infer.engine")


@dataclass(frozen=True)
class Add:
    """Queue a request."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Abort:
    """Forget a request, if it is there."""

    request_id: str


class Question(StrEnum):
    """What may be asked between two steps."""

    DESCRIPTION = "description"
    MEMORY = "memory"


@dataclass(frozen=True)
class Ask:
    """Answer a question; ``number`` comes back with the answer."""

    number: int
    question: Question


@dataclass(frozen=True)
class Stop:
    """End the loop."""


Command = Add | Abort | Ask | Stop


@dataclass(frozen=True)
class Refused:
    """The engine did not take a request: ``refusal``, or None where it raised what it should not.

    Rare: the queue's last place went to a preempted request meanwhile, or there is a bug.
    """

    request_id: str
    refusal: InferError | None


@dataclass(frozen=True)
class Idle:
    """The engine has nothing to do, and commands may have changed its load since the last event."""


@dataclass(frozen=True)
class Answered:
    """What became of :class:`Ask`; ``failure`` says what was raised instead."""

    number: int
    answer: Any
    failure: str | None = None


@dataclass(frozen=True)
class Stepped:
    """What one step did, and when: readings of ``time.perf_counter``."""

    started: float
    ended: float
    outputs: list[StepOutput]
    prefilled: tuple[str, ...]
    num_preempted: int


@dataclass(frozen=True)
class Crashed:
    """The loop has ended with an exception, named here."""

    cause: str


Event = Refused | Idle | Answered | Stepped | Crashed
Tell = Callable[[Event, EngineLoad, int], None]
"""Takes an event, the load after it, and how many :class:`Add` the loop had obeyed by then."""


class Inbox(Protocol):
    """Where commands come from; ``queue.SimpleQueue`` is one."""

    def get(self, block: bool = True) -> Command:
        """The next command; raises ``queue.Empty`` if there is none and ``block`` is False."""


class EngineHandle(Protocol):
    """The loop as seen from outside, wherever it runs, with what is known of its engine beforehand."""

    config: Any
    model_config: Any
    tokenizer: Any
    max_seq_len: int
    request_capacity: int  # tokens that the KV memory can hold for one request
    load: EngineLoad  # when the loop had not begun

    def start(self, tell: Tell) -> None:
        """Begin; ``tell`` is called on any thread."""

    def send(self, command: Command) -> None:
        """Put a command in the loop's inbox, without waiting."""

    def delivered(self) -> None:
        """An event that was told has been dealt with."""

    def join(self, timeout: float) -> None:
        """Wait for the loop, which was told to stop, to end."""

    @property
    def is_alive(self) -> bool: ...


class EngineLoop:
    """Owns ``engine`` while :meth:`run` runs."""

    def __init__(self, engine: ServedEngine, inbox: Inbox, tell: Tell) -> None:
        self._engine = engine
        self._inbox = inbox
        self._tell_with_load = tell
        self._load = engine.load()
        self._num_added = 0

    def run(self) -> None:
        """Until it is told to stop, or something is raised that no request is to blame for."""
        try:
            while self._obey():
                if self._engine.has_work():
                    self._step()
                else:
                    self._tell(Idle())
        except BaseException as error:
            _log.critical("the engine's loop died", exc_info=error)
            crashed = Crashed(f"{type(error).__name__}: {error}")
            self._tell_with_load(crashed, self._load, self._num_added)  # the engine is not asked any more

    def _obey(self) -> bool:
        """Run the commands that wait, and if there is no work wait for the first; False to end."""
        block = not self._engine.has_work()
        try:
            while True:
                match self._inbox.get(block):
                    case Add() as command:
                        self._add(command)
                    case Abort(request_id):
                        self._engine.abort(request_id)
                    case Ask(number, question):
                        self._tell(self._answer(number, question))
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
        self._tell(Stepped(started, ended, outputs, prefilled, len(record.preempted)))

    def _add(self, command: Add) -> None:
        self._num_added += 1
        try:
            self._engine.add_request(command.prompt_ids, command.params, command.request_id)
        except InferError as refusal:
            self._tell(Refused(command.request_id, refusal))
        except Exception as bug:
            _log.error("request %s could not be added", command.request_id, exc_info=bug)
            self._tell(Refused(command.request_id, None))

    def _answer(self, number: int, question: Question) -> Answered:
        try:
            if question is Question.MEMORY:
                return Answered(number, MemoryMap.of(self._engine.scheduler, self._engine.last_step))
            return Answered(number, self._description())
        except Exception as bug:
            _log.error("a question about the engine could not be answered", exc_info=bug)
            return Answered(number, None, f"{type(bug).__name__}: {bug}")

    def _description(self) -> dict[str, Any]:
        """What the engine says of itself; ``audit`` lists what its memory holds or has wrong."""
        record = self._engine.last_step
        return {
            "load": dataclasses.asdict(self._engine.load()),
            "stats": self._engine.stats(),
            "last_step": None if record is None else dataclasses.asdict(record),
            "audit": [str(problem) for problem in self._engine.pool.audit()],
        }

    def _tell(self, event: Event) -> None:
        self._load = self._engine.load()
        self._tell_with_load(event, self._load, self._num_added)
