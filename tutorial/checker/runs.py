"""Runs the ``python run`` fences of a page, in order, in one process of the page's own.

A fence is run once, when it is first asked for, and after all run fences before it. Being a process of its own, the
page finds a fresh interpreter and leaves nothing behind in the tests: no default dtype, no seeds, no variables. Where
forks are supported, that process is a fork of one that has imported PyTorch, which takes longer than most pages.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path

from tutorial.checker.chapter import Chapter, Fence, Problem
from tutorial.checker.matching import printed_lines, reconcile
from tutorial.checker.report import changed
from tutorial.checker.surroundings import TIME_LIMIT, Surroundings
from tutorial.checker.worker import serve_in_fork
from tutorial.workshop.fork_server import IS_SUPPORTED, ForkedProcess, ForkServer

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors.torch")
"""What most pages import; not Triton, which reads a variable that pages set."""


@dataclass(frozen=True)
class Outcome:
    """What a fence printed, and why it failed if it did."""

    printed: str
    failure: str | None


class PageRun:
    """The state of a page's run fences; close it when the page is done."""

    def __init__(self, chapter: Chapter, surroundings: Surroundings) -> None:
        self._chapter = chapter
        self._surroundings = surroundings
        self._outcomes: dict[int, Outcome] = {}
        self._process: _Process | ForkedProcess | None = None
        self._connection: Connection | None = None

    def check(self, fence: Fence) -> list[Problem]:
        """Run the fence, and those before it, and compare what it printed with the output fence after it."""
        for earlier in self._chapter.fences:
            if earlier.kind != "run" or earlier.line > fence.line or (earlier.is_demo and not fence.is_demo):
                continue
            outcome = self._outcome(earlier)
            if outcome.failure is not None:
                which = "" if earlier is fence else f"the run fence on line {earlier.line}, which comes before this, "
                return [Problem(fence.line, f"{which}{outcome.failure}")]
        output = self._chapter.outputs.get(fence.line)
        if output is None:
            return []
        printed = printed_lines(self._surroundings.portable(self._outcome(fence).printed))
        if not printed:
            return [Problem(output.line, "the fence above prints nothing; remove this output fence")]
        fixed = reconcile(output.body, printed)
        return changed(output, fixed, "the output shown is not what the code above prints")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _outcome(self, fence: Fence) -> Outcome:
        if fence.line not in self._outcomes:
            self._outcomes[fence.line] = self._run(fence)
        return self._outcomes[fence.line]

    def _run(self, fence: Fence) -> Outcome:
        process, connection = self._start()
        code = "\n".join(fence.body) + "\n"
        request = {"path": str(self._chapter.path), "line": fence.line, "code": code, "demo": fence.is_demo}
        try:
            connection.send_bytes(json.dumps(request).encode())
            if not connection.poll(TIME_LIMIT):
                self.close()
                return Outcome("", f"did not end within {TIME_LIMIT} seconds")
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code_name = process.wait()
            self.close()
            return Outcome("", f"ended the interpreter, with exit code {code_name}")
        if answer["traceback"] is None:
            return Outcome(answer["printed"], None)
        told = "\n".join(part.rstrip() for part in (answer["printed"], answer["errors"], answer["traceback"]) if part)
        return Outcome(answer["printed"], f"raised an exception\n{told}")

    def _start(self) -> "tuple[_Process | ForkedProcess, Connection]":
        if self._process is None or self._connection is None:
            root, home = str(self._surroundings.root), str(self._surroundings.home)
            environment = self._surroundings.environment()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                if IS_SUPPORTED:
                    serve = partial(serve_in_fork, root, home)
                    self._process = _server().start([], environment, theirs.fileno(), serve)
                else:
                    self._process = _Process(theirs.fileno(), home, environment)
                self._connection = Connection(ours.detach())
        return self._process, self._connection


class _Process(subprocess.Popen[bytes]):
    """A page's process that begins with nothing imported."""

    def __init__(self, descriptor: int, home: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(descriptor)]
        super().__init__(command, cwd=home, env=environment, pass_fds=[descriptor], start_new_session=True)

    def end(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


@cache
def _server() -> ForkServer:
    """The server of which pages are forks, with what packages read when they are imported."""
    surroundings = Surroundings(Path(__file__).parents[2])
    environment = surroundings.environment() | {"PYTHONPATH": ""}
    surroundings.close()
    server = ForkServer(_PACKAGES, environment)
    atexit.register(server.close)
    return server
