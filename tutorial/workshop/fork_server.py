"""Processes that begin where imports end: a server imports what is heavy once, and each run of pytest is a fork of it.

PyTorch, transformers and pytest's plugins take seconds to import, and the tests of an exercise often take less. The
server imports packages of other projects alone: a fork installs its workspace before it imports the first module that a
workspace may replace. The server computes nothing either, so that it has one thread when it forks. A server that stays
imports what few tests need only when it is quiet, so that the first run does not wait for it.

    client ─ requests ─ server ─ forks ─ supervisor ─ forks ─ run
       └────────── one socket for each run ──┘

A server belongs to the process that started it and ends with it, or it listens at an address, where the runs of any
process of the same user reach it (`tutorial.workshop.warm_server`).

A supervisor waits for one run, and ends it when the client says so or is gone. It is a subreaper: each process of the
run that loses its parent becomes the supervisor's child, also if it left the process group. Invariant: when
`ForkedProcess.wait` has returned, no process that the run started is left, unless it ended its supervisor on purpose.
After CPython's ``multiprocessing.forkserver``, whose children have neither an output nor an environment of their own.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

IS_SUPPORTED = sys.platform == "linux"
LEAST_MEMORY = 1 << 30
"""Bytes that must be available on the machine; with fewer, a server that stays and is idle ends."""

_ROOT = Path(__file__).resolve().parents[2]
_NUMBER = struct.Struct("!q")
_SECONDS_PER_LOOK = 5.0
_QUIET_SECONDS = 1.0
"""Without a run, after which a server that stays imports what is left; a second run often follows a first."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class ForkServer:
    """A server process, started when it is first needed and again if it was killed.

    Args:
        packages: modules to import before the first run, none of this project; one that is missing is passed over.
        later: further ones, which few runs need. A server that ends with this process imports them at once, since it
            has many runs; one that stays does so when it is quiet.
        environment: all variables of the server. Those that a package reads when it is imported, such as
            ``TRITON_INTERPRET``, must be here; a run's own environment comes too late for them.
        idle_seconds: for how long without a new run the server stays, also for other processes of the user; with 0 it
            ends with this process.
    """

    def __init__(
        self,
        packages: Sequence[str],
        environment: Mapping[str, str],
        idle_seconds: float = 0.0,
        later: Sequence[str] = (),
    ) -> None:
        self.packages = tuple(packages) if idle_seconds else (*packages, *later)
        self.later = tuple(later) if idle_seconds else ()
        self.environment = {
            **environment,
            "OMP_NUM_THREADS": "1",  # no pool of threads that a fork would lack
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for a GPU must not initialise CUDA before the fork
        }
        self.idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        before: Callable[[], None] | None = None,
    ) -> "ForkedProcess":
        """Run pytest in a fork.

        Args:
            output: the file that takes its standard output and error.
            before: called in the fork first (to set limits); must be picklable.

        A server that ends before the run begins is started again, once; then this raises ChildProcessError.
        """
        request = pickle.dumps((tuple(arguments), dict(environment), before))
        for _ in range(2):
            ours = self._ask(output)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the end of file below says so too
                ours.sendall(_NUMBER.pack(len(request)) + request)
            pid = _read_number(ours)
            if pid is not None:
                return ForkedProcess(pid, ours)
            ours.close()
        raise ChildProcessError("the server of the tests ended before the run began")

    def _ask(self, output: int) -> socket.socket:
        """Ask the server, which is started if need be, for a run with this output; the run's socket."""
        if self.idle_seconds:
            from tutorial.workshop import warm_server

            def start(listener: socket.socket) -> None:
                # A terminal or a pipe that the server held open would not close with the command that started it.
                launch(
                    listener,
                    self.packages,
                    self.environment,
                    self.idle_seconds,
                    self.later,
                    stderr=subprocess.DEVNULL,
                )

            ours = warm_server.connect((*self.packages, *self.later), self.environment, start)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(ours, [b"r"], [output])
            return ours
        ours, theirs = socket.socketpair()
        with self._lock, theirs, contextlib.suppress(BrokenPipeError):
            if self._process is None or self._process.poll() is not None:
                self._launch()
            assert self._control is not None
            socket.send_fds(self._control, [b"r"], [theirs.fileno(), output])
        return ours

    def close(self) -> None:
        """End the server, unless it stays; runs that go on are ended by their supervisors when their client is."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _launch(self) -> None:
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = launch(theirs, self.packages, self.environment)


def launch(
    control: socket.socket,
    packages: Sequence[str],
    environment: Mapping[str, str],
    idle_seconds: float = 0.0,
    later: Sequence[str] = (),
    *,
    stderr: int | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a server that takes requests from this socket, which is connected to a client or listens."""
    names = [",".join(packages), ",".join(later)]
    return subprocess.Popen(
        [sys.executable, "-m", "tutorial.workshop.fork_server", str(control.fileno()), str(idle_seconds), *names],
        cwd=_ROOT,
        env=environment,
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # an interruption reaches the client alone
    )


class ForkedProcess:
    """A run in a process group of its own; the part of `subprocess.Popen` that is needed, for a process of another."""

    def __init__(self, pid: int, supervisor: socket.socket) -> None:
        self.pid = pid
        self._supervisor = supervisor
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; raises `subprocess.TimeoutExpired`."""
        if self._code is None:
            if not select.select([self._supervisor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("pytest", timeout or 0)
            code = _read_number(self._supervisor)
            self._supervisor.close()
            self._code = -signal.SIGKILL if code is None else code  # None: the run killed its supervisor
        return self._code

    def end(self) -> None:
        """Kill the run and all that it started; returns when they are gone."""
        if self._code is None:
            with contextlib.suppress(OSError):
                self._supervisor.shutdown(socket.SHUT_WR)
            self.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _read_number(channel: socket.socket) -> int | None:
    """A number from the other end, None if that has closed."""
    data = _read(channel, _NUMBER.size)
    return None if data is None else int(_NUMBER.unpack(data)[0])


def _read(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < num_bytes and (part := channel.recv(num_bytes - len(data))):
            data += part
    return data if len(data) == num_bytes else None


def _serve(control: socket.socket, idle_seconds: float, packages: Sequence[str], later: Sequence[str]) -> bytes:
    """The server: import, then fork for each request. Returns the request, in a fork that is a run."""
    _import(packages)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    left, runs = list(later), list[int]()
    while True:
        if idle_seconds:
            _import_while_quiet(control, left, runs)
            if not _is_wanted(control, idle_seconds):
                os._exit(0)
            client, output = control.accept()[0], None
        else:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not descriptors:
                os._exit(0)  # the client is gone
            client, output = socket.socket(fileno=descriptors[0]), descriptors[1]
        supervisor = os.fork()
        if supervisor == 0:
            control.close()
            if output is None:  # received here, so that a client that sends nothing holds up no other
                _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
                output = descriptors[0] if descriptors else os._exit(1)
            return _supervise(client, output)
        if left:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                runs.append(os.pidfd_open(supervisor))
        client.close()
        if output is not None:
            os.close(output)


def _import(packages: Sequence[str]) -> None:
    for name in packages:
        with contextlib.suppress(ImportError):  # the tests that need it will say so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every page, and so copy it
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # PyTorch's would take each of its operators back, one by one, at the end of each fork


def _import_while_quiet(listener: socket.socket, left: list[str], runs: list[int]) -> None:
    """Import what is left, one after the other, until a client waits; none while one of the ``runs`` goes on, whose
    supervisors' descriptors are closed when they have ended."""
    seconds = _QUIET_SECONDS
    while left:
        ready = select.select([listener.fileno(), *runs], [], [], seconds)[0]
        if listener.fileno() in ready:
            return
        for run in ready:
            runs.remove(run)
            os.close(run)
        if not runs and not ready:
            _import([left.pop(0)])
            seconds = 0.0


def _is_wanted(listener: socket.socket, idle_seconds: float) -> bool:
    """Wait for a client; False if the server is to end."""
    import psutil

    last = time.monotonic() + idle_seconds
    while (left := last - time.monotonic()) > 0:
        if select.select([listener], [], [], min(left, _SECONDS_PER_LOOK))[0]:
            return True
        if psutil.virtual_memory().available < LEAST_MEMORY:
            return False
    return False


def _supervise(client: socket.socket, output: int) -> bytes:
    """Fork a run, wait until it ends or is to end, and end what it started; returns the request, in the run alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    request = _read(client, _read_number(client) or 0)
    if not request:
        os._exit(1)
    run = os.fork()
    if run == 0:
        client.close()
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        return request
    os.close(output)
    client.sendall(_NUMBER.pack(run))
    select.select([client.fileno(), os.pidfd_open(run)], [], [])
    code = _end_children(run)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(_NUMBER.pack(code))
    os._exit(0)


def _end_children(run: int) -> int:
    """Kill all processes below this one, until there are none; the exit code of ``run``."""
    import psutil

    code = 0
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if pid == run:
            code = os.waitstatus_to_exitcode(status)


def _run_pytest(request: bytes) -> int:
    arguments, environment, before = pickle.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["pytest", *arguments]
    random.seed()  # forks of one server would draw the same numbers
    if before is not None:
        before()
    import pytest

    # Plugins that are imported already cannot have their assertions rewritten, and hold none that matter here.
    return int(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))


def _main() -> None:
    packages, later = ([name for name in names.split(",") if name] for names in sys.argv[3:5])
    request = _serve(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), packages, later)
    code = 1
    try:
        code = _run_pytest(request)
    except BaseException:
        traceback.print_exc()
    # What follows in an interpreter that ends, freeing all modules, takes longer than many a run.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
