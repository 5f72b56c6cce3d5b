"""Renders templates that are not ours in a separate process, within limits. Introduced in phase 2.

A checkpoint's chat template is a program of unknown origin: it may loop, allocate, or break out of Jinja's sandbox. It
runs in a child, `template_child`, which gets no environment variables, such as keys.

Invariant: whatever a template does, `render` returns its text or raises RequestError, after at most `SECONDS`.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.errors import RequestError

SECONDS = 2
MEMORY_BYTES = 256 * 2**20
TEXT_BYTES = 2**20
_START_SECONDS = 60.0  # for starting Python and Jinja, before a template runs
_REPLY_BYTES = 8 * TEXT_BYTES  # JSON writes a character with at most six bytes
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")


class TemplateBoundError(RequestError):
    """The child had to be killed."""


class TemplateProcess:
    """Starts a child for the first template, and again after one that killed it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Mapping[str, Any], now: datetime) -> str:
        """Render a template; returns its text. ``variables`` are JSON values; ``now`` is what ``strftime_now``
        reads. Raises RequestError if the template fails or refuses the conversation, or exceeds a limit.
        """
        line = json.dumps({"source": source, "variables": dict(variables), "now": now.isoformat()}).encode() + b"\n"
        with self._lock:
            child = self._child if self._child and self._child.poll() is None else self._started()
            assert child.stdin is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
                reply = json.loads(self._read(child, SECONDS))
            except (OSError, ValueError) as error:
                code = self._end(child)
                is_late = isinstance(error, TimeoutError) or code == -signal.SIGXCPU
                why = f"it takes more than {SECONDS} s" if is_late else f"its process ended with the code {code}"
                raise TemplateBoundError(f"The chat template failed: {why}.") from None
        answer = reply if isinstance(reply, dict) else {}
        if isinstance(text := answer.get("text"), str):
            return text
        raise RequestError(f"The chat template failed: {answer.get('error')}.")

    def close(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            if self._child is not None:
                self._end(self._child)

    def _started(self) -> "subprocess.Popen[bytes]":
        paths = dict.fromkeys(str(_folder_of(name)) for name in ("jinja2", "markupsafe"))
        child = self._child = subprocess.Popen(
            # -S, -s, -P: no .pth files and no user folders; PYTHONPATH gives the import path
            [sys.executable, "-SsPB", str(Path(__file__).with_name("template_child.py"))]
            + [str(limit) for limit in (SECONDS, MEMORY_BYTES, TEXT_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in _INHERITED if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"},
        )
        # When this process ends, the child reads the end of its input; a fork's end must not stop it.
        weakref.finalize(self, child.kill).atexit = False
        try:
            self._read(child, _START_SECONDS)
        except OSError:
            code = self._end(child)
            raise TemplateBoundError(f"The process for chat templates does not start (exit code {code}).") from None
        return child

    def _read(self, child: "subprocess.Popen[bytes]", seconds: float) -> bytes:
        """A line from the child. Raises OSError if the child ends, or if the line is too long or late."""
        assert child.stdout is not None
        line, deadline = bytearray(), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                piece = os.read(child.stdout.fileno(), 2**16)
                if not piece or len(line) > _REPLY_BYTES:
                    raise OSError("no whole line")
                line += piece
        return bytes(line)

    def _end(self, child: "subprocess.Popen[bytes]") -> int:
        """Kill the child, unless it has ended; returns its exit code."""
        self._child = None
        child.kill()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(OSError):  # unwritten data is lost with the child
                pipe.close()
        return child.wait()


def _folder_of(package: str) -> Path:
    found = find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]
