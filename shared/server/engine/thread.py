"""The engine on its own thread. Introduced in phase 4.

A step may take a long time; on the event loop it would delay every response and every health check. Invariant: once the
thread is running, no other thread uses the engine.
"""

import queue
import threading

from shared.server.engine.loop import Command, EngineLoop, Publish
from shared.server.engine.served_engine import EngineFacts, ServedEngine


class EngineThread:
    """An :class:`shared.server.engine.loop.EngineHandle`."""

    def __init__(self, engine: ServedEngine) -> None:
        self.facts = EngineFacts.of(engine)
        self.tokenizer = engine.tokenizer
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, publish: Publish) -> None:
        loop = EngineLoop(self._engine, self._inbox, publish)
        self._thread = threading.Thread(target=loop.run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
