"""What a test of an exercise may take.

Two timers of the kernel, one of processor time and one of wall time, are set before each part of a test (its fixtures,
its call). The signal of a timer is handled in C: `faulthandler` writes the stack of whatever is running, and then the
signal ends the process. The learner's code can neither catch it nor delay it, also in a loop inside a C function. Who
started the run reads the stack afterwards (`tutorial.workshop.time_outs`). Introduced in phase 1b. Invariant: one timer
ends one run, so at most one test of a run has run out of time, and it is the last one that began.
"""

import contextlib
import faulthandler
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from tutorial.workshop.time_outs import stack_file
from tutorial.workshop.verdicts import covers

_TIMERS = {"processor": (signal.SIGPROF, signal.ITIMER_PROF), "wall": (signal.SIGALRM, signal.ITIMER_REAL)}


class TimeLimit:
    """A pytest plugin that sets the timers.

    Args:
        recorder: whose ``path`` the files of the stacks stand beside; in a fork of the run it may be another.
        processor: seconds of processor time for each test, by its node id without parameters.
        wall: seconds of wall time for any test.
    """

    def __init__(self, recorder: Any, processor: Mapping[str, float], wall: float) -> None:
        self.recorder = recorder
        self.processor = processor
        self.wall = wall
        self._path: Path | None = None
        self._stacks: list[IO[str]] = []  # open as long as a signal may write to them

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.recorder.write(began=item.nodeid, **self._seconds(item.nodeid))
        with self._armed(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._armed(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        with self._armed(item):
            return (yield)

    @contextlib.contextmanager
    def _armed(self, item: pytest.Item) -> Iterator[None]:
        if self._path != self.recorder.path:
            self._path = self.recorder.path
            self._stacks = []
            for limit, (number, _) in _TIMERS.items():
                self._stacks.append(stack_file(self._path, limit).open("w"))
                faulthandler.register(number, self._stacks[-1], all_threads=True, chain=True)
        for limit, seconds in self._seconds(item.nodeid).items():
            signal.setitimer(_TIMERS[limit][1], seconds)
        try:
            yield
        finally:
            for _, timer in _TIMERS.values():
                signal.setitimer(timer, 0)

    def _seconds(self, test: str) -> dict[str, float]:
        return {
            "processor": max(seconds for named, seconds in self.processor.items() if covers(named, test)),
            "wall": self.wall,
        }
