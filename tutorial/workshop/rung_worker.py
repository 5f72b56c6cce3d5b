"""One side of a learner's ladder: measures the phases in a process of its own, a step whenever it is told to.

Started by `tutorial.workshop.chart` as ``python -m tutorial.workshop.rung_worker`` with the settings as JSON. Before
and after each step of the measurement it writes a line to what was standard output and waits for one on standard input.
So two of these, one over the workspace and one over the reference, never compute at the same time and take turns trial
by trial. Its last line holds the report, and for each phase the functions with exercises that were called while it was
loaded and warmed up; the trials run without that look. What the learner's code prints goes to standard error.
"""

import json
import os
import sys
from types import FrameType
from typing import Any, TextIO

from shared.errors import InferError
from tutorial.workshop.exercises import ROOT, exercises, order
from tutorial.workshop.overlay import install, is_enabled, workspace_folder

WATCHED = ("load", "warm up")


class Turns:
    """Meets the other side before and after each step, and notes whose functions are called in between."""

    def __init__(self, channel: TextIO) -> None:
        self.channel = channel
        self.is_inside = False
        self.functions = {
            (str(folder / exercise.path), exercise.target): exercise.number
            for exercise in exercises()
            for folder in (workspace_folder(), ROOT)
        }
        self.called: dict[str, set[str]] = {}

    def say(self, **values: Any) -> None:
        self.channel.write(json.dumps(values) + "\n")
        self.channel.flush()

    def wait(self, step: str, done: int, total: int) -> None:
        """Say what comes, and stand still until told to go on."""
        self.say(step=step, done=done, total=total)
        if not sys.stdin.readline():
            sys.exit(1)  # the other end is gone

    def meet(self, step: str, done: int, total: int) -> None:
        """The measurement's progress callback: called when a step begins and again when it has ended."""
        sys.setprofile(None)
        self.is_inside = not self.is_inside
        self.wait(step, done, total)
        phase, _, what = step.partition(": ")
        if self.is_inside and what in WATCHED:
            called = self.called.setdefault(phase.removeprefix("phase "), set())

            def note(frame: FrameType, event: str, argument: Any) -> None:
                number = self.functions.get((frame.f_code.co_filename, frame.f_code.co_qualname))
                if number is not None:
                    called.add(number)

            sys.setprofile(note)


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    turns = Turns(channel)
    try:
        if is_enabled():
            install()
        from benchmarks.ladder import measure_ladder

        turns.wait("begin", 0, 1)
        report = measure_ladder(progress=turns.meet, context_lengths=(), **json.loads(sys.argv[1]))
    except InferError as error:
        turns.say(error=str(error))
        sys.exit(1)
    called = {phase: sorted(numbers, key=order) for phase, numbers in turns.called.items()}
    turns.say(report=report.to_dict(), machine_title=report.machine_title, called=called)


if __name__ == "__main__":
    main()
