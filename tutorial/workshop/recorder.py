"""A pytest plugin that writes down what became of each test, and whose code the exercises' functions were.

Loaded with ``-p tutorial.workshop.recorder``; ``INFER_WORKSHOP_RECORD`` holds JSON: the file to write, of each
exercise, by number, its module and the function in it, and perhaps the limits of a `TimeLimit`. The file has one JSON
object a line, written as soon as it is known: a program that ends in the middle leaves what it had proved, and what is
missing counts as not passed. Only the process that began writes, a copy of it made by ``fork`` does not, and the
variable is gone before any code of the learner's runs: nothing finds the file by accident.
"""

import inspect
import json
import linecache
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import pytest

from tutorial.workshop.time_limit import TimeLimit
from tutorial.workshop.verdicts import RECORD

MOST_LETTERS = 500
MOST_DETAILS = 12
INTERPRETERS_OWN = "InterpreterError"  # what Triton's interpreter wraps around an error, once for each function


class Recorder:
    """Writes lines: first ``collected``, the number of tests; then what became of each, as the fields of a `Case` (and
    with limits, before it, that it ``began``); and last ``files``, whose code each exercise's function was."""

    def __init__(self, file: str, functions: Mapping[str, tuple[str, str]]) -> None:
        self.path, self.functions = Path(file), functions
        self.process = os.getpid()
        self.places: dict[tuple[str, int], int] = {}

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Of a test's three parts the call counts, and of the others a failure."""
        if call.excinfo is None:
            if call.when == "call":
                self.write(test=item.nodeid, outcome="passed")
            return
        if call.excinfo.errisinstance(pytest.skip.Exception):
            self.write(test=item.nodeid, outcome="skipped", error=str(call.excinfo.value))
            return
        errors = list(_chain(call.excinfo.value))
        where = self._hide_the_reference(errors)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
        errors = [e for e in errors if type(e).__name__ != INTERPRETERS_OWN] or errors
        error = next((e for e in errors if isinstance(e, NotImplementedError)), errors[0])
        text = _lines(error)
        self.write(
            test=item.nodeid,
            outcome="failed",
            error=f"{type(error).__name__}: {text[0]}"[:MOST_LETTERS] if text else type(error).__name__,
            details=text[1:MOST_DETAILS],
            where=where,
            traceback=str(item.repr_failure(call.excinfo)) if item.config.option.tbstyle != "no" else "",
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or ["cannot be collected"]
            self.write(test=report.nodeid, outcome="failed", error=lines[-1].removeprefix("E").strip()[:MOST_LETTERS])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=len(session.items))

    def pytest_sessionfinish(self) -> None:
        loaded = {number: each for number, each in self.functions.items() if each[0] in sys.modules}
        self.write(files={number: _file(sys.modules[module], name) for number, (module, name) in loaded.items()})

    def _hide_the_reference(self, errors: Sequence[BaseException]) -> str | None:
        """Take the reference's lines, which ran in gaps, out of the tracebacks; the last line of the learner's left."""
        where = None
        for error in errors:
            kept = []
            for frame, line in traceback.walk_tb(error.__traceback__):
                own = self._own_line(frame.f_code.co_filename, line)
                if own != 0:
                    kept.append((frame, line))
                if own:
                    where = f"{frame.f_code.co_filename}:{own}"
            tail: TracebackType | None = None
            for frame, line in reversed(kept):
                tail = TracebackType(tail, frame, -1, line)
            error.__traceback__ = tail
        return where

    def _own_line(self, file: str, line: int) -> int | None:
        """The line of a workspace's file as the learner sees it, 0 for the reference's; None of any other file."""
        from tutorial.workshop.overlay import workspace_folder
        from tutorial.workshop.skeleton import corresponding_line

        if not file.startswith(f"{workspace_folder()}{os.sep}"):
            return None
        if (file, line) not in self.places:
            ran, own = "".join(linecache.getlines(file)), Path(file).read_text(encoding="utf-8", errors="replace")
            self.places[file, line] = corresponding_line(ran, own, line) or 0
        return self.places[file, line]

    def write(self, **values: Any) -> None:
        """Write one line, unless this process is a copy of the one that began."""
        if os.getpid() != self.process:
            return
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(values) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if RECORD in os.environ:
        settings = json.loads(os.environ.pop(RECORD))
        limits = settings.pop("limits", None)
        recorder = Recorder(**settings)
        config.pluginmanager.register(recorder)
        if limits is not None:
            config.pluginmanager.register(TimeLimit(recorder, **limits))


def _chain(error: BaseException | None) -> Any:
    """An error, what it was raised from, and what those were raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lines(error: BaseException) -> list[str]:
    """What an error says. Of an assertion with a message, without what pytest adds of the expression's parts."""
    lines = [line.rstrip()[:MOST_LETTERS] for line in str(error).splitlines() if line.strip()]
    added = next((index for index, line in enumerate(lines) if index and line.startswith("assert ")), len(lines))
    return lines[:added]


def _file(module: Any, target: str) -> str | None:
    """The file that a function's code was compiled from; None if it is no function any more."""
    found: Any = module
    for name in target.split("."):
        found = inspect.getattr_static(found, name, None)
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or getattr(found, "fn", None) or found
    code = getattr(inspect.unwrap(found) if callable(found) else found, "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else None
