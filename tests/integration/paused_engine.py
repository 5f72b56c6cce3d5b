"""An engine that a test lets run for as many steps as it wants, so that what happens between two steps can be seen."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

from shared.server.engine.loop import Abort
from shared.server.engine.thread import EngineThread


class Steps:
    """The steps that an engine may run. Without any it has no work: it takes requests and answers questions."""

    def __init__(self, engine: Any) -> None:
        self._has_work, self._step = engine.has_work, engine.step
        self._may_run, self._is_last = True, lambda: False
        engine.has_work = lambda: self._may_run and self._has_work()
        engine.step = self._counted_step
        vars(engine).setdefault("may_step", threading.Event())  # which a stand-in for an engine has
        self.handle = EngineThread(engine)

    def pause(self) -> None:
        self._may_run = False

    def run_until(self, is_last: Callable[[], bool]) -> None:
        """Let the engine run until this is so after a step."""
        self._is_last, self._may_run = is_last, True
        self.handle.send(Abort("no request, but a command: the engine looks for work"))

    def run(self, number: int) -> None:
        left = itertools.count(number - 1, -1)
        self.run_until(lambda: next(left) <= 0)

    def resume(self) -> None:
        self.run_until(lambda: False)

    def _counted_step(self) -> Any:
        outputs = self._step()
        if self._is_last():
            self._may_run = False
        return outputs
