"""The engine on a thread of its own. Introduced in phase 4.

A step takes as long as it takes; on the event loop it would delay every other client's bytes and every health check.
Invariant: nobody else touches the engine once the thread runs.
"""

import queue
import threading

from shared.server.engine_loop import Command, EngineLoop, Tell
from shared.server.served_engine import ServedEngine


class EngineThread:
    """See :class:`shared.server.engine_loop.EngineHandle`."""

    def __init__(self, engine: ServedEngine) -> None:
        self.config = engine.config
        self.model_config = engine.model.config
        self.tokenizer = engine.tokenizer
        self.max_seq_len = engine.max_seq_len
        self.request_capacity = engine.pool.request_capacity
        self.load = engine.load()
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, tell: Tell) -> None:
        loop = EngineLoop(self._engine, self._inbox, tell)
        self._thread = threading.Thread(target=loop.run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def delivered(self) -> None:
        pass

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
