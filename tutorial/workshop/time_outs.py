"""Which of the learner's lines were running when a test ran out of time, from the stack that was written then.

`tutorial.workshop.time_limit` ends the run. Introduced in phase 1b. Invariant: a line that is named is the learner's as
their file numbers it, never one of the reference's that ran in a gap.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutorial.workshop.exercises import ROOT
from tutorial.workshop.skeleton import corresponding_line, filled

_SAID = {"processor": "s of processor time", "wall": "s"}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')


def stack_file(record: Path, limit: str) -> Path:
    """Where the stack is written when a limit is over."""
    return record.with_name(f"{record.name}.{limit}")


def time_out(
    record: Path, entries: Sequence[Mapping[str, Any]], workspace: Path, *, gaps_raise: bool
) -> dict[str, Any] | None:
    """The test that ran out of time, as the fields of a `Case`; None if none did.

    Its ``where`` is the innermost line of the learner's that was running. If there was none, as in a loop of the
    course's that waits for what the learner's lines return, the details name the course's line.
    """
    for limit, said in _SAID.items():
        file = stack_file(record, limit)
        stack = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        began = next((entry for entry in reversed(entries) if "began" in entry), None)
        if not stack.strip() or began is None:
            continue
        # faulthandler writes paths in ASCII, the innermost frame of a thread first, and the main thread last.
        frames = [(path, int(line)) for thread in stack.split("\n\n")[::-1] for path, line in _FRAME.findall(thread)]
        where = next(filter(None, (_own_line(path, line, workspace, gaps_raise) for path, line in frames)), None)
        ours = (frame for frame in frames if Path(frame[0]).is_relative_to(ROOT) and "site-packages" not in frame[0])
        course = (f"{path}:{line}" for path, line in ours)
        return {
            "test": began["began"],
            "outcome": "failed",
            "error": f"TimeoutError: did not finish within {began[limit]:g} {said}; "
            "correct code needs a tenth of that at most",
            "details": [] if where else [f"none of your lines was running, but {next(course, 'a library')}"],
            "where": where,
            "is_time_out": True,
        }
    return None


def _own_line(path: str, line: int, workspace: Path, gaps_raise: bool) -> str | None:
    """A line of the workspace's as the learner sees it, file:line; None for any other file, and for the reference's
    lines in a gap."""
    folder = f"{workspace}/".encode("ascii", "backslashreplace").decode()
    if not path.startswith(folder):
        return None
    module = path.removeprefix(folder)
    own = (workspace / module).read_text(encoding="utf-8", errors="replace")
    ran = own if gaps_raise else filled(own, (ROOT / module).read_text(encoding="utf-8"))[0]
    number = corresponding_line(ran, own, line)
    return f"{workspace / module}:{number}" if number else None
