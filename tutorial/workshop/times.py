"""How long a learner's exercises take, noted in the workspace if they agree. Introduced in phase 1b.

Each command that works on exercises leaves a mark, when and on which. The time between two marks counts for the
exercises of the later one, until they pass; more than `BREAK` is a break and counts for none. Invariant: without
agreement nothing is noted, nothing is sent anywhere, and a record that cannot be read or written disturbs no command.
"""

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError

_FILE = ".times.jsonl"
BREAK = 30 * 60.0
"""Seconds between two commands that are taken for a break."""


class Times:
    """The record of one workspace: a line that says whether the learner agrees, then one for each mark."""

    def __init__(self, workspace: Path) -> None:
        self.file = workspace / _FILE

    @property
    def agreed(self) -> bool | None:
        """Whether the learner agrees; None if they have not been asked."""
        return next((bool(line["agreed"]) for line in self._lines() if "agreed" in line), None)

    def agree(self, agreed: bool) -> None:
        """Begin a record, or delete what was recorded and note that nothing is to be."""
        if agreed and self.agreed:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({"agreed": agreed}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self.file} cannot be written ({error.strerror}).") from None

    def mark(self, worked_on: Iterable[str] = (), passed: Iterable[str] = (), at: float | None = None) -> None:
        """Note that these exercises, by number, were worked on until now (``at``, in seconds since the epoch), and
        which of them passed; with none, that work begins."""
        if self.agreed:
            mark = {"at": time.time() if at is None else at, "on": list(worked_on), "passed": list(passed)}
            with suppress(OSError), self.file.open("ab+") as out:
                out.seek(-1, os.SEEK_END)
                torn = b"" if out.read() == b"\n" else b"\n"  # a line that could not be written whole stays by itself
                out.write(torn + json.dumps(mark).encode() + b"\n")

    def minutes(self) -> dict[str, float]:
        """By number, how long each exercise took until it passed, or so far."""
        found: dict[str, float] = {}
        passed: set[str] = set()
        last: float | None = None
        for mark in (line for line in self._lines() if "agreed" not in line):
            own = [number for number in mark["on"] if number not in passed]
            took = 0.0 if last is None else mark["at"] - last
            for number in own:
                found[number] = found.get(number, 0.0) + (took / 60 / len(own) if 0 <= took <= BREAK else 0.0)
            passed.update(mark["passed"])
            last = mark["at"]
        return found

    def _lines(self) -> list[dict]:
        """The lines that were written whole."""
        found = []
        with suppress(OSError):
            for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]
