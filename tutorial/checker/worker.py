"""The process that runs a page's fences: ``python -P worker.py FD``, or a fork. It imports nothing of ours.

Messages on the socket FD are JSON. For each request, ``{"path", "line", "code", "demo"}``, one answer: ``{"printed",
"errors", "traceback"}``, the last one None if the code ran through. Lines of tracebacks are those of the page.

Plain fences share one namespace. Fences marked ``demo`` have another one, which sees all that plain fences bound and
keeps its own names to itself: so a plain fence cannot come to need the demo model by accident.
"""

import io
import json
import os
import sys
import tempfile
import traceback
import types
from multiprocessing.connection import Connection

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0", "::")


def refuse_network(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: raises where code would reach another machine."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    host = host.decode(errors="replace") if isinstance(host, bytes) else host
    if isinstance(host, str) and host and not host.startswith(LOOPBACK):
        raise PermissionError(f"a chapter's code runs without a network, and this reaches for {host}")


class Capture:
    """A file in the place of a standard stream, so that child processes and C code are captured too."""

    def __init__(self, descriptor: int) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        os.dup2(self.file.fileno(), descriptor)
        self.read = 0

    def take(self) -> str:
        """What was written since the last call."""
        end = os.lseek(self.file.fileno(), 0, os.SEEK_END)
        data = os.pread(self.file.fileno(), end - self.read, self.read)
        self.read = end
        return data.decode(errors="replace")


def execute(request: dict[str, object], namespace: dict[str, object]) -> str | None:
    """Run one fence; returns the traceback, in the page's lines, if it did not run through."""
    try:
        # The fence's first line of code is on the line after the one that opens it.
        source = "\n" * int(str(request["line"])) + str(request["code"])
        code = compile(source, str(request["path"]), "exec", dont_inherit=True)
        exec(code, namespace)
    except BaseException as error:
        skipped = error.__traceback__.tb_next if error.__traceback__ else None  # this function's own frame
        return "".join(traceback.format_exception(type(error), error, skipped))
    return None


def serve_in_fork(root: str, home: str) -> None:
    """Be the page's process in a fork of a server, whose standard output is the socket; does not return."""
    os.chdir(home)
    server = os.path.realpath(sys.path[0])
    sys.path[:] = [root, home, *(path for path in sys.path[1:] if path and os.path.realpath(path) != server)]
    main(os.dup(1))
    os._exit(0)


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    printed, errors = Capture(1), Capture(2)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # as on a terminal, so that children print in between
    sys.addaudithook(refuse_network)
    modules = {False: types.ModuleType("chapter"), True: types.ModuleType("chapter_demo")}
    for module in modules.values():
        sys.modules[module.__name__] = module
    plain, demo = (vars(modules[is_demo]) for is_demo in (False, True))
    passed_on: dict[str, object] = dict(plain)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if request["demo"]:
            news = {name: value for name, value in plain.items() if passed_on.get(name, plain) is not value}
            demo.update(news)
            passed_on.update(news)
        failure = execute(request, demo if request["demo"] else plain)
        sys.stdout.flush()
        sys.stderr.flush()
        answer = {"printed": printed.take(), "errors": errors.take(), "traceback": failure}
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
