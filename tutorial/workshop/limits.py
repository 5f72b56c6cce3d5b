"""What a run of a learner's code may use: time, processor time, memory, processes, output.

The kernel keeps most limits, one process at a time; a `Watch` looks at the run as a whole while it goes on, since
memory and time can also be used by many processes, or by one that waits. Invariant: whatever happens in the run, it
ends after a time that is known before, and takes its processes along.
"""

import contextlib
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tutorial.workshop.check import SECONDS_TO_START, RunEndedError

MEMORY = 3.0
"""GiB that a run may ask for. The tests of all exercises need 0.75. The kernel counts writable private mappings, and
those of a CUDA driver are none. On an H200 with PyTorch 2.11, a context adds 13 GiB to the address space and 0.03 to
what is counted; a process that has multiplied matrices, captured a graph and run a Triton kernel has 1.0."""
MOST_PROCESSES = 32
MOST_FILE_BYTES = 16 << 20
GRACE = 5.0


@dataclass(frozen=True)
class Limits:
    """Limits of one run of tests.

    Memory is counted in two ways: what one process may ask for (``RLIMIT_DATA``, which leaves out address space that is
    only reserved), and what all processes of the run hold together.
    """

    seconds: float = 120.0  # that one test may take
    memory: float = MEMORY  # GiB

    def total_seconds(self, num_exercises: int) -> float:
        """How long a run may take altogether."""
        return SECONDS_TO_START + self.seconds * (num_exercises + 1)

    def apply(self, num_exercises: int) -> None:
        """Limit this process and those that it will start; to be called in a new process."""
        processor = round(self.total_seconds(num_exercises) + GRACE)
        _limit(resource.RLIMIT_DATA, round(self.memory * 2**30))
        _limit(resource.RLIMIT_CPU, processor)
        _limit(resource.RLIMIT_FSIZE, MOST_FILE_BYTES)
        _limit(resource.RLIMIT_CORE, 0)


def limit_memory() -> None:
    """Limit the memory of this process, in which a learner's check runs, to what it may have when it is graded: lines
    that keep what they make would take all of the machine's before their time is over."""
    _limit(resource.RLIMIT_DATA, round(MEMORY * 2**30))


class Watch:
    """Ends a run when no test has ended for too long, when it holds too much, or when ``stop`` is set.

    Args:
        grace: seconds that a test may take beyond its limit, where pytest is to end it first.
    """

    def __init__(self, limits: Limits, stop: threading.Event, grace: float = 0.0) -> None:
        self.limits = limits
        self.stop = stop
        self.seconds = limits.seconds + grace
        self.size = 0
        self.since = time.monotonic()

    def __call__(self, pid: int, record: Path) -> None:
        """Look once; raises `RunEndedError` with the reason."""
        if self.stop.is_set():
            raise RunEndedError("the grading was interrupted")
        size = record.stat().st_size if record.exists() else 0
        if size != self.size:
            self.size, self.since = size, time.monotonic()
        waited = time.monotonic() - self.since
        if size == 0 and waited > SECONDS_TO_START:
            raise RunEndedError(f"its modules were not loaded after {SECONDS_TO_START:g} s")
        if size and waited > self.seconds:
            raise RunEndedError(f"a test had not ended after {self.limits.seconds:g} s")
        count, held = _held(pid)
        if held > self.limits.memory * 2**30:
            raise RunEndedError(f"it held {held / 2**30:.1f} GiB, more than {self.limits.memory:g}")
        if count > MOST_PROCESSES:
            raise RunEndedError(f"it had started {count} processes, more than {MOST_PROCESSES}")


def end_processes(variable: str, value: str) -> None:
    """End the processes that began with this environment variable; they may have left their group and parent."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value:
                process.kill()


def _held(pid: int) -> tuple[int, int]:
    """How many processes began with this one, itself included, and the bytes in memory of all of them."""
    count, held = 0, 0
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in [first, *first.children(recursive=True)]:
            count += 1
            with contextlib.suppress(psutil.Error):
                held += process.memory_info().rss
    return count, held


def _limit(kind: int, value: int) -> None:
    """Lower a limit; one that the system does not support, or has lower already, stays as it is."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))
