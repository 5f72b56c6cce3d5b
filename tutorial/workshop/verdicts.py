"""What a run of tests says about each exercise: its outcome, every case, and the one to look at first.

Invariant: an exercise passes only if every test mapped to it ran to its end and passed, and the function that it asks
for was compiled from a file of the workspace.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tutorial.workshop.exercises import Exercise

RECORD = "INFER_WORKSHOP_RECORD"
"""The variable by which a run is told what to record, and where (`tutorial.workshop.recorder`)."""


class Outcome(StrEnum):
    """What became of one exercise."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"
    GAP = "to do"
    NEW = "not started"


@dataclass(frozen=True)
class Case:
    """One test with one set of parameters."""

    test: str  # its node id
    outcome: str  # passed, failed or skipped
    error: str = ""  # the type of the exception and its first line
    details: tuple[str, ...] = ()  # further lines of its message
    where: str | None = None  # the last line of the learner's that the error went through, file:line
    traceback: str = ""  # if tracebacks were asked for
    is_time_out: bool = False  # it failed because its time was over, which ended the run

    @property
    def name(self) -> str:
        """The test function, without file and parameters: ``TestPool::runTest`` or ``test_x``."""
        return self.test.partition("::")[2].partition("[")[0] or self.test

    @property
    def parameters(self) -> str:
        """What stands in the brackets."""
        return self.test.partition("[")[2].removesuffix("]")

    @property
    def size(self) -> float:
        """The product of the numbers in its parameters, by which the smallest of several failures is chosen."""
        return math.prod(max(1, int(number)) for number in re.findall(r"\b\d{1,9}\b", self.parameters))


@dataclass(frozen=True)
class Verdict:
    """The judgement of one exercise: outcome, how many of its cases passed, the reason, and where it happened."""

    exercise: Exercise
    outcome: Outcome
    num_passed: int = 0
    num_tests: int = 0
    reason: str = ""
    test: str | None = None  # the failure to look at first
    where: str | None = None  # the last line of the learner's that its error went through
    file: str | None = None  # that the exercise's function was compiled from
    cases: tuple[Case, ...] = ()
    is_kept: bool = False  # of an earlier check, since when nothing has changed

    @property
    def first_failure(self) -> Case | None:
        """The case to show: one that ran out of time in the learner's lines; else the smallest failing case of the
        first failing test, in the order of the exercise's tests; else one that ran out of time in other lines, which
        waited for something that the learner's lines did not give.
        """
        failed = [case for case in self.cases if case.outcome == "failed"]
        late = [case for case in failed if case.is_time_out]
        others = [case for case in failed if not case.is_time_out]
        shown = late
        if others and not any(case.where for case in late):
            shown = [case for case in others if case.name == others[0].name]
        return min(shown, key=lambda case: case.size, default=None)


def judge(
    exercise: Exercise,
    results: Sequence[Case],
    files: Mapping[str, str | None],
    workspace: Path,
    ended: Mapping[str, str],
) -> Verdict:
    """The verdict on one exercise.

    Args:
        results: every case that came to its end.
        files: by exercise, the file that its function was compiled from.
        ended: by test, what is to be said of one that did not come to its end.
    """
    cases = tuple(case for test in exercise.tests for case in results if covers(test, case.test))
    cases = tuple(dict.fromkeys(cases))
    mine = [case for case in cases if case.outcome != "skipped"]  # a case that needs a GPU, say
    passed = [case for case in mine if case.outcome == "passed"]
    file = files.get(exercise.number)

    def verdict(outcome: Outcome, reason: str = "", test: str | None = None, where: str | None = None) -> Verdict:
        return Verdict(exercise, outcome, len(passed), len(mine), reason, test, where, file, cases)

    first = verdict(Outcome.FAILED).first_failure
    if first is not None:
        where = first.where if first.where and first.where.startswith(f"{workspace}{os.sep}") else None
        return verdict(Outcome.FAILED, first.error, first.test, where)
    missing = [test for test in exercise.tests if not any(covers(test, case.test) for case in passed)]
    if missing:
        skipped = [case.error for case in cases if case.outcome == "skipped"]
        return verdict(Outcome.NOT_RUN, skipped[0] if skipped else ended[missing[0]], missing[0])
    if not files:
        return verdict(Outcome.NOT_RUN, ended[exercise.tests[0]])
    if file is None or not Path(file).is_relative_to(workspace):
        return verdict(
            Outcome.NOT_RUN, f"{exercise.target} that ran is not the workspace's, but {file or 'no function'}"
        )
    return verdict(Outcome.PASSED)


def covers(named: str, test: str) -> bool:
    """Whether a node id in ``lesson.toml`` means this test: itself, one of its parameters, or its file's collection."""
    return test == named or test.startswith((f"{named}[", f"{named}::")) or test == named.partition("::")[0]
