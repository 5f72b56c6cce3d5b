"""Where a learner is: the exercise at hand, the case on which it fails, and how many exercises have passed.

It is read from the progress that checks leave in a workspace, in a folder or in a zip file that was handed in, so that
none of a learner's code runs. Introduced in phase 1b. Invariant: a standing holds a name that the learner has chosen,
numbers of exercises, names of the course's tests, and counts: no lines and no messages of the learner's code.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from tutorial.workshop.exercises import Exercise, exercises
from tutorial.workshop.submission import read_submission

PROGRESS = ".progress.json"
MOST_LETTERS = 40
"""Of a name."""
_MOST_LETTERS_OF_A_CASE = 200
_MOST = 10**12
_UNREADABLE = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What JSON that is none, too deep, or of other types raises."""
_NUMBER = re.compile(r"\d\d[.0-9ab]*x\d+")


@dataclass(frozen=True)
class Standing:
    """One learner's."""

    name: str
    exercise: str = ""  # at hand; none if nothing has been started
    case: str = ""  # the one to look at first, if the last check of that exercise failed
    num_failed: int = 0  # checks of it that failed, one after the other
    num_hints: int = 0  # that were shown for it
    num_passed: int = 0  # exercises
    checked: float = 0.0  # when the last check was, in seconds since the epoch; 0: never
    problem: str = ""  # why nothing is known

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def read_standing(path: Path, name: str) -> Standing:
    """The standing in a workspace, a folder around one, or a zip file of either."""
    submission = read_submission(path, name, [PROGRESS])
    content = submission.files.get(PROGRESS)
    if submission.refused or content is None:
        said = submission.refused or submission.problems.get(PROGRESS) or "nothing has been checked in it"
        return Standing(name, problem=said)
    try:
        found = standing_of(name, dict(json.loads(content).items()))
        if _counts_are_right(found):
            return found
    except _UNREADABLE:
        pass
    return Standing(name, problem=f"its {PROGRESS} cannot be read")


def standing_of(name: str, progress: Mapping[str, Mapping[str, Any]]) -> Standing:
    """The standing that a workspace's progress tells of: the exercise that was checked last, or the next one if that
    has passed."""
    known = [(exercise, progress[exercise.number]) for exercise in exercises() if exercise.number in progress]
    left = [exercise for exercise, entry in known if entry.get("is_started") and not entry.get("passed")]
    last, latest = max(known, key=lambda each: float(each[1].get("checked", 0)), default=(None, {}))
    at = last if last in left else _next(left, last)
    own = progress[at.number] if at else {}
    return Standing(
        name,
        at.number if at else "",
        str(own.get("case", ""))[:_MOST_LETTERS_OF_A_CASE],
        int(own.get("num_failed", 0)),
        int(own.get("hints", 0)),
        sum(bool(entry.get("passed")) for _, entry in known),
        float(latest.get("checked", 0)),
    )


def received(content: bytes) -> Standing:
    """A standing that another process sent; ConfigError if it is none."""
    try:
        fields = json.loads(content)
        standing = Standing(**fields)
        types = all(type(value) is type(getattr(Standing(""), key)) for key, value in fields.items())
        is_right = types and not standing.problem and _counts_are_right(standing)
        is_right = is_right and len(standing.case) <= _MOST_LETTERS_OF_A_CASE and bool(checked_name(standing.name))
        if is_right and (standing.exercise == "" or _NUMBER.fullmatch(standing.exercise)):
            return standing
    except (*_UNREADABLE, ConfigError):
        pass
    raise ConfigError("This is no standing.")


def checked_name(name: str) -> str:
    """A name that a board shows; ConfigError for one that it does not."""
    if not name.strip() or len(name) > MOST_LETTERS or not name.isprintable():
        raise ConfigError(f"The name {name[:MOST_LETTERS]!r} must have 1 to {MOST_LETTERS} printable letters.")
    return name


def case_name(test: str | None) -> str:
    """What a standing says of a test, by its node id: its function and parameters."""
    return "" if test is None else (test.partition("::")[2] or test)[:_MOST_LETTERS_OF_A_CASE]


def _counts_are_right(standing: Standing) -> bool:
    """Whether each is a number that a board can show; NaN and infinity are none."""
    counts = (standing.num_failed, standing.num_hints, standing.num_passed, standing.checked)
    return all(0 <= count < _MOST for count in counts)


def _next(left: list[Exercise], last: Exercise | None) -> Exercise | None:
    """The first of these after the last that was checked, or the first of all."""
    order = exercises()
    later = [exercise for exercise in left if last is None or order.index(exercise) > order.index(last)]
    return next(iter(later or left), None)
