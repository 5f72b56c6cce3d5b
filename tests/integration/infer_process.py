"""``infer`` as a process of its own, as a user at a terminal starts it."""

import atexit
import os
import resource
import signal
import subprocess
import sys
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from tests.forks import FORKS

ROOT = Path(__file__).parents[2]
INFER = [sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')"]


def heed_interrupts() -> None:
    """For ``preexec_fn``: a shell's background jobs inherit an ignored SIGINT; a terminal's do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class InferProcess:
    """``infer`` with ``arguments``, with the part of ``subprocess.Popen``'s interface that tests use.

    It is forked from a process that has made the imports, and computes on one thread.

    Args:
        log: the file that standard error goes to; None: the three standard streams are pipes.
        descriptors: the most that the process may have open; None: as many as this one.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def __init__(self, *arguments: str, log: Path | None = None, descriptors: int | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if log is None:
            (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
            self.stdin, self.stdout, self.stderr = (
                os.fdopen(end, mode, buffering=0)
                for end, mode in ((to_stdin, "wb"), (from_stdout, "rb"), (from_stderr, "rb"))
            )
            theirs = [stdin, stdout, stderr]
        else:
            theirs = [os.open(os.devnull, os.O_RDONLY), 1, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)]
        streams = [Descriptor(end) for end in theirs]
        self._process = FORKS.Process(target=run, args=(arguments, streams, environment, descriptors))
        atexit.register(self._process.kill)  # runs before multiprocessing waits for its end
        self._process.start()
        for end in theirs:
            if end > 2:
                os.close(end)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("infer", timeout)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Descriptor:
    """An open file of this process; unpickled in a fork, the number of its copy there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detach, (DupFd(self.number),)


def _detach(copy: Any) -> int:
    number: int = copy.detach()
    return number


def run(arguments: list[str], streams: list[int], environment: dict[str, str], descriptors: int | None) -> None:
    """The fork's main function."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    import torch

    from shared.cli import app

    torch.set_num_threads(1)
    app(list(arguments), prog_name="infer")
