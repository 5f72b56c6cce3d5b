"""Compiles grammars in a separate process, so that a costly grammar delays no step. Introduced in phase 12.

The compiler is written in Python, and the threads of a process share Python's lock: compiled on server threads, a few
costly grammars would stop every stream of an engine in the same process for seconds. This process has a low priority,
imports neither PyTorch nor the server, and has its own memory limit.

Each grammar is first tried with a small part of its work limit. A grammar that needs more is compiled again by a second
thread, so small grammars never wait for large ones. Work is counted, not timed, so whether a grammar is large does not
depend on the machine.

Invariants: one large grammar is compiled at a time; the process ends when the server does, for whatever reason; if the
process is lost, its pending grammars are refused, and the next request starts it again.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock, Thread

import numpy as np
from numpy.typing import NDArray

from shared.child_process import start_child
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError, Limits, WorkError

MOST_BYTES = 512_000_000
"""Maximum bytes of memory that the process may write to."""
QUICK = replace(Limits(), work=Limits.work // 20, drops=False)
"""The work limit for a grammar that is not large."""
_PRIORITY = 10
_START = "from shared.server.engine.grammar_process import main; main()"


class GrammarProcess:
    """The server's end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._running: dict[int, Future[Grammar]] = {}
        self._num_sent = 0

    def start(self) -> None:
        """Start the process unless it is running; does not wait for its imports."""
        with self._lock:
            self._start()

    def compile(self, grammar: Grammar, usable_bytes: NDArray[np.bool_]) -> Grammar:
        """The grammar with its automaton; waits for it. ``usable_bytes`` as in :meth:`Grammar.compiled`.

        Raises GrammarError.
        """
        future: Future[Grammar] = Future()
        with self._lock:
            pipe = self._start()
            self._num_sent += 1
            self._running[self._num_sent] = future
            with contextlib.suppress(OSError):  # the reading thread notices a lost process too
                pipe.send((self._num_sent, grammar, usable_bytes))
        return future.result()

    def close(self) -> None:
        """End the process, and refuse the grammars being compiled."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _start(self) -> Connection:
        if self._process is None or self._pipe is None:
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = start_child(_START, (theirs.fileno(),), {"OPENBLAS_NUM_THREADS": "1"})
            ends = self._process, self._pipe
            Thread(target=self._read, args=ends, name="compiled grammars", daemon=True).start()
        return self._pipe

    def _read(self, process: "subprocess.Popen[bytes]", pipe: Connection) -> None:
        """Deliver the process's results until it ends."""
        with pipe, contextlib.suppress(EOFError, OSError):
            while True:
                number, made = pipe.recv()
                with self._lock:
                    future = self._running.pop(number)
                if isinstance(made, Grammar):
                    future.set_result(made)
                else:
                    future.set_exception(made)
        code = process.wait()
        with self._lock:
            self._process = self._pipe = None
            lost, self._running = self._running, {}
        for future in lost.values():
            future.set_exception(
                GrammarError(f"The process that compiled this grammar ended with exit code {code}; send it again.")
            )


def main() -> None:
    """The process: reads grammars until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server, which answers accepted requests
    os.nice(_PRIORITY)
    with contextlib.suppress(ValueError):  # there may already be a lower limit
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    _Compiler(Connection(int(sys.argv[1]))).run()
    os._exit(0)  # without waiting for pending compilations


class _Compiler:
    """The process's side: one thread for first attempts, another for large grammars."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.lock = Lock()  # of writing
        self.quick, self.large = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def run(self) -> None:
        """Read grammars until the pipe closes."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, grammar, usable_bytes = self.pipe.recv()
                self.quick.submit(self._try, number, grammar, usable_bytes)

    def _try(self, number: int, grammar: Grammar, usable_bytes: NDArray[np.bool_]) -> None:
        made = _made(grammar, usable_bytes, QUICK)
        if isinstance(made, (MemoryError, WorkError)):
            self.large.submit(lambda: self._send(number, _made(grammar, usable_bytes, Limits())))
        else:
            self._send(number, made)

    def _send(self, number: int, made: Grammar | Exception) -> None:
        if isinstance(made, MemoryError):
            made = GrammarError(f"The grammar took more than {MOST_BYTES} bytes to compile; make it smaller.")
        with self.lock, contextlib.suppress(OSError):
            self.pipe.send((number, made))


def _made(grammar: Grammar, usable_bytes: NDArray[np.bool_], limits: Limits) -> Grammar | Exception:
    """The compiled grammar, or the error."""
    try:
        return grammar.compiled(usable_bytes, limits)
    except (GrammarError, MemoryError) as error:
        return error
    except Exception as error:
        return RuntimeError(f"{type(error).__name__} while a grammar was compiled: {error}")
