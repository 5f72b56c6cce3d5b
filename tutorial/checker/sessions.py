"""Runs the ``console`` fences of a page and compares what the commands print.

Each line ``$ COMMAND`` is run by a bash of its own at the repository's root, with nothing on its standard input; a
command that ends in a backslash continues in the next line. The text between a command and the next is what it
prints, standard error included, matched as ``matching.py`` says. A command has to end with exit code 0, unless what is
shown ends with a line ``exit code N``.
"""

import os
import re
import signal
import subprocess
from dataclasses import dataclass

from tutorial.checker.chapter import Fence, Problem
from tutorial.checker.matching import printed_lines, reconcile
from tutorial.checker.report import changed, readable_diff
from tutorial.checker.surroundings import TIME_LIMIT, Surroundings

PROMPT = "$ "
_EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True)
class Command:
    """A command of a session. In the fence's body it begins on line ``start``, its output is ``[first, last)``."""

    text: str
    start: int
    first: int
    last: int
    exit_code: int


def commands(fence: Fence) -> list[Command]:
    """The commands of a console fence, in order. The ``exit code`` line belongs to no output."""
    found: list[Command] = []
    starts = [i for i, line in enumerate(fence.body) if line.startswith(PROMPT)]
    for start, end in zip(starts, [*starts[1:], len(fence.body)], strict=True):
        first, text = start + 1, fence.body[start].removeprefix(PROMPT)
        while text.endswith("\\") and first < end:
            text = f"{text}\n{fence.body[first].removeprefix('> ')}"
            first += 1
        last = end
        while last > first and not fence.body[last - 1].strip():
            last -= 1
        code = _EXIT_CODE.fullmatch(fence.body[last - 1].strip()) if last > first else None
        found.append(Command(text, start, first, last - 1 if code else last, int(code[1]) if code else 0))
    return found


def misplaced(fence: Fence) -> list[Problem]:
    """What is wrong with a session before anything is run."""
    first = next((i for i, line in enumerate(fence.body) if line.strip()), None)
    if first is None or not fence.body[first].startswith(PROMPT):
        line = fence.line if first is None else fence.line + 1 + first
        return [Problem(line, f"a console fence begins with a command, a line that starts with `{PROMPT}`")]
    return []


def check_session(fence: Fence, surroundings: Surroundings) -> list[Problem]:
    """Run the commands and compare; every command is run, whatever became of those before it."""
    problems = misplaced(fence)
    for command in [] if problems else commands(fence):
        exit_code, text = _run(command.text, surroundings)
        printed = printed_lines(surroundings.portable(text))
        shown = fence.body[command.first : command.last]
        line = fence.line + 1 + command.start
        if exit_code != command.exit_code:
            ended = f"did not end within {TIME_LIMIT} seconds" if exit_code is None else f"ended with code {exit_code}"
            message = f"{ended}, and the page says exit code {command.exit_code}: {command.text}"
            problems.append(Problem(line, f"{message}\n{readable_diff(shown, printed)}"))
            continue
        message = f"the output shown is not what was printed by: {command.text}"
        found = reconcile(shown, printed)
        problems += changed(fence, found, message, first=command.first, last=command.last, line=line)
    return problems


def _run(command: str, surroundings: Surroundings) -> tuple[int | None, str]:
    """Exit code and output of a command; the code is None if it had to be stopped."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=surroundings.root,
        env=surroundings.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
        return process.returncode, output.decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output.decode(errors="replace")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
