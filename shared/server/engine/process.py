"""The engine in its own process. Introduced in phase 6.1.

Only one thread of a process runs Python at a time (the GIL). On a GPU, a decode step is limited by the host. While the
server formats and sends responses, no kernel is launched. Here the engine loop has its own interpreter, and the outputs
of a step cross the pipe in one message (as in vLLM, whose engine core is also a process).

Invariants: the pipe is the process's only connection to the server, and the process ends when the pipe closes, however
the server ended; it ignores SIGINT and SIGTERM, which a terminal or a supervisor sends to both; the event loop reads at
most ``MAX_EVENTS`` before it handles them, and if it falls behind, the pipe fills and the engine waits.
"""

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import select
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from shared.errors import InferError
from shared.loading.resolve import resolve_model
from shared.server.engine.command_codec import CommandCodec
from shared.server.engine.loop import Command, Crashed, EngineLoop, Publish, Stop
from shared.server.engine.served_engine import EngineFacts, ServedEngine
from shared.text.tokenizer import Tokenizer

MAX_EVENTS = 16
END_SECONDS = 60.0  # time to wait for the exit code of a process that has closed its pipe
_log = logging.getLogger("infer.engine")


class EngineProcess:
    """An :class:`shared.server.engine.loop.EngineHandle`; the constructor returns when the engine is loaded.

    Args:
        make: makes the engine, in the process; picklable: a module's function, or a ``functools.partial`` of one.

    Raises:
        InferError: whatever ``make`` raised.
        RuntimeError: the process ended before the engine was loaded; its own output says why.
    """

    def __init__(self, make: Callable[[], ServedEngine]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and the CUDA context
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, make), name="engine", daemon=True)
        self._process.start()
        theirs.close()
        atexit.register(self._process.kill)  # runs before multiprocessing joins the process
        try:
            facts = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"The engine's process ended with exit code {self._process.exitcode} while it loaded the model."
            ) from None
        if isinstance(facts, InferError):
            raise facts
        self.facts: EngineFacts = facts
        self.tokenizer = Tokenizer.load(resolve_model(facts.config.model))
        self._load = facts.load
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._has_more = readiness(self._pipe)
        self._num_added = 0

    def start(self, publish: Publish) -> None:
        """Publish on the calling event loop. A thread would get Python's lock for only one event at a time, so a server
        that has fallen behind would still write the tokens of each step separately.
        """
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read, publish)
        # uvloop makes what it watches non-blocking, and then a full pipe would fail the writer, and lose its commands.
        os.set_blocking(self._pipe.fileno(), True)
        threading.Thread(target=self._write, name="engine pipe", daemon=True).start()

    def send(self, command: Command) -> None:
        self._commands.put(command)  # a thread writes it to the pipe, which may be full

    def join(self, timeout: float) -> None:
        # Only one thread may wait for the exit code, which is the reader; any thread may wait for the sentinel.
        wait([self._process.sentinel], timeout)

    @property
    def is_alive(self) -> bool:
        return not wait([self._process.sentinel], 0)

    def _write(self) -> None:
        codec = CommandCodec()
        with contextlib.suppress(OSError):
            while True:
                command = self._commands.get()
                self._pipe.send_bytes(codec.dumps(command))
                if isinstance(command, Stop):
                    return

    def _read(self, publish: Publish) -> None:
        """Publish the events that have arrived; there are several if the event loop is behind."""
        try:
            for _ in range(MAX_EVENTS):
                event, self._load, self._num_added = self._pipe.recv()
                publish(event, self._load, self._num_added)
                if not self._has_more(0):
                    return
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            threading.Thread(target=self._end, args=(publish,), daemon=True).start()

    def _end(self, publish: Publish) -> None:
        self._process.join(END_SECONDS)
        cause = f"the engine's process ended with exit code {self._process.exitcode}"
        _log.critical(cause) if self._process.exitcode else _log.debug(cause)
        publish(Crashed(cause), self._load, self._num_added)


class PipeInbox:
    """Reads commands from a pipe; a closed pipe means :class:`Stop`."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._codec = CommandCodec()
        self._has_more = readiness(pipe)

    def get(self, block: bool = True) -> Command:
        if not block and not self._has_more(0):
            raise queue.Empty
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return Stop()
        return self._codec.loads(message)


def readiness(pipe: "Connection[Any, Any]") -> Callable[[float], object]:
    """Like ``pipe.poll``, which makes a new selector each time; this keeps one, since every step polls."""
    readable = select.poll()
    readable.register(pipe, select.POLLIN)
    return readable.poll


def _run(pipe: "Connection[Any, Any]", make: Callable[[], ServedEngine]) -> None:
    """The main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def send(message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the server is gone, so the inbox returns Stop
            pipe.send(message)

    try:
        engine = make()
    except InferError as refusal:
        send(refusal)
        return
    send(EngineFacts.of(engine))
    EngineLoop(engine, PipeInbox(pipe), lambda *event_and_load: send(event_and_load)).run()
