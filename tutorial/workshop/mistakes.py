"""Known mistakes: what learners write in place of an exercise's lines, and what one would tell them.

``tutorial/mistakes/NN.toml`` holds those of phase NN::

    [[mistakes]]
    exercise = "03x2"
    says = "attention ends before the step's new tokens"
    changes = [["length + num_new", "length"]]

Each change replaces a text that stands once in the exercise's lines of the reference; variants of a mistake that behave
differently share its sentence. A learner's code is compared with
a mistake by behaviour: both went through the same tests, the same cases failed, and with the same first wrong
values. What the mistakes do is found out by running them, in forks of the server that ran the learner's code.
"""

import ast
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from shared.errors import ConfigError
from tutorial.workshop.check import CheckServer
from tutorial.workshop.course_state import state_of_the_course
from tutorial.workshop.exercises import Exercise, reference
from tutorial.workshop.skeleton import exercise_around
from tutorial.workshop.verdicts import Case, Outcome, Verdict
from tutorial.workshop.version_runs import run_versions

FOLDER = Path(__file__).parents[1] / "mistakes"
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?|\bnan\b|-?\binf\b")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_DEVIATION = re.compile(r"expected (-?\d\S*), got (-?\d\S*)")
_TOLERANCE = 1e-3
_TOLERANCE_OF_DEVIATIONS = 0.05
"""Of what is wrong by little, the value is near that of any other mistake; what it is wrong by is not."""
_PRINTED = 2e-6
"""Of a value of six digits, how far two that are printed may be apart if they are equal."""
MOST_ALIKE = 3
"""Mistakes that one set of tests cannot tell apart, and that are still named; a test keeps to it."""


@dataclass(frozen=True)
class Mistake:
    """One mistake: the sentence that says what it is, and how it differs from the reference's lines."""

    exercise: str
    says: str
    changes: tuple[tuple[str, str], ...]

    def text(self, exercise: Exercise) -> str:
        """The module with the mistake in it. ConfigError if a change does not fit the exercise's lines."""
        source, region = reference(exercise)
        lines = "\n".join(region.lines)
        for old, new in self.changes:
            if lines.count(old) != 1:
                raise ConfigError(
                    f"Mistake {self.says!r} of {self.exercise}: {old!r} stands {lines.count(old)} times in the "
                    "exercise's lines; it must stand there once."
                )
            lines = lines.replace(old, new)
        whole = source.split("\n")
        whole[region.begin + 1 : region.end] = lines.split("\n")
        return "\n".join(whole)


@cache
def mistakes_of(exercise: Exercise) -> tuple[Mistake, ...]:
    """The known mistakes of an exercise, in the order of the file; none if there is no file."""
    file = FOLDER / f"{exercise.phase}.toml"
    if not file.is_file():
        return ()
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["mistakes"]
    found = (Mistake(e["exercise"], e["says"], tuple((old, new) for old, new in e["changes"])) for e in entries)
    return tuple(mistake for mistake in found if mistake.exercise == exercise.number)


def run_mistakes(
    server: CheckServer,
    wanted: Sequence[Exercise],
    kept: Path | None = None,
    watch: Callable[[int, Path], None] | None = None,
) -> dict[Exercise, dict[Mistake, Verdict]]:
    """What the tests say of each known mistake of some exercises.

    Args:
        kept: a folder in which the results are kept, and found again as long as nothing of the course has changed.
        watch: as in `CheckServer.run`; results of runs that it ends are not kept.
    """
    files = {} if kept is None else {exercise: kept / f"{exercise.number}.json" for exercise in wanted}
    state = state_of_the_course() if files else ""
    found = {exercise: _read(files[exercise], state, exercise) if files else None for exercise in wanted}
    left = [(exercise, mistake) for exercise in wanted if found[exercise] is None for mistake in mistakes_of(exercise)]
    runs = run_versions(server, [(exercise, mistake.text(exercise)) for exercise, mistake in left], watch)
    for exercise in [exercise for exercise in wanted if found[exercise] is None]:
        verdicts = [run.verdicts[0] for (of, _), run in zip(left, runs, strict=True) if of == exercise]
        found[exercise] = verdicts
        if files and all(verdict.outcome is Outcome.FAILED for verdict in verdicts):
            files[exercise].parent.mkdir(parents=True, exist_ok=True)
            cases = [[verdict.outcome, [asdict(case) for case in verdict.cases]] for verdict in verdicts]
            files[exercise].write_text(json.dumps({"state": state, "verdicts": cases}), encoding="utf-8")
    return {exercise: dict(zip(mistakes_of(exercise), found[exercise] or (), strict=True)) for exercise in wanted}


def recognise(verdict: Verdict, known: Mapping[Mistake, Verdict]) -> tuple[Mistake, ...]:
    """The known mistakes that behave as the judged code does, one for each sentence; none if they are too many to
    name."""
    found = {mistake.says: mistake for mistake, other in known.items() if is_alike(verdict, other)}
    return tuple(found.values()) if len(found) <= MOST_ALIKE else ()


def returns_nothing(exercise: Exercise, text: str) -> bool:
    """Whether an exercise's function returns no value in the module's ``text``, and does in the reference."""
    return _returns(reference(exercise)[0], exercise.target) and not _returns(text, exercise.target)


def fails_by_returning_nothing(verdict: Verdict, text: str) -> bool:
    """Whether an exercise failed because its function, in the module's ``text``, returned no value. It returned nothing
    at all if one of the exercise's own lines raised or ran out of time."""
    line = int((verdict.where or "").rpartition(":")[2] or 0)
    stopped_inside = exercise_around(text, line) == verdict.exercise.number
    return not stopped_inside and returns_nothing(verdict.exercise, text)


def _returns(source: str, target: str) -> bool:
    """Whether a function returns or yields a value anywhere; of one that cannot be read, that it does."""
    try:
        found: ast.AST = ast.parse(source)
        for name in target.split("."):
            forms = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            found = next(node for node in found.body if isinstance(node, forms) and node.name == name)  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, StopIteration):
        return True
    waiting: list[ast.AST] = [*found.body]  # type: ignore[attr-defined]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom) or (isinstance(node, ast.Return) and node.value is not None):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def is_alike(one: Verdict, other: Verdict) -> bool:
    """Whether the same cases failed, each with the same first line of its error, numbers being rounded."""
    if one.outcome is not Outcome.FAILED or other.outcome is not Outcome.FAILED:
        return False
    return are_alike(one.cases, other.cases)


def are_alike(one: Sequence[Case], other: Sequence[Case]) -> bool:
    """Whether the same cases of the same tests failed, each with the same first line of its error, numbers being
    rounded."""
    cases, others = ({case.test: case for case in each} for each in (one, other))
    return cases.keys() == others.keys() and all(_is_same(case, others[test]) for test, case in cases.items())


def _is_same(one: Case, other: Case) -> bool:
    if one.outcome != other.outcome:
        return False
    error, other_error = (_ADDRESS.sub("", case.error) for case in (one, other))  # where an object lies is chance
    if _NUMBER.sub("#", error) != _NUMBER.sub("#", other_error):
        return False
    pairs = zip_longest(_numbers([error]), _numbers([other_error]), fillvalue=math.nan)
    return all(_is_near(a, b) for a, b in pairs) and _deviate_alike(error, other_error)


def _deviate_alike(one: str, other: str) -> bool:
    """Whether two wrong values differ from the expected one by nearly the same, if both errors say it."""
    found = [_DEVIATION.search(error) for error in (one, other)]
    values = [_numbers([match[1], match[2]]) for match in found if match is not None]
    if [len(each) for each in values] != [2, 2]:
        return True
    (expected, got), (other_expected, other_got) = values
    apart = _PRINTED * max(abs(expected), abs(got))
    deviations = got - expected, other_got - other_expected
    return math.isclose(*deviations, rel_tol=_TOLERANCE_OF_DEVIATIONS, abs_tol=apart)


def _is_near(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or a == b or (a % 1 != 0 and math.isclose(a, b, rel_tol=_TOLERANCE))


def _numbers(lines: Sequence[str]) -> list[float]:
    return [float(number.replace(",", "").rstrip(".")) for line in lines for number in _NUMBER.findall(line)]


def _read(file: Path, state: str, exercise: Exercise) -> list[Verdict] | None:
    """The verdicts that are kept; None if there are none, or the course has changed since."""
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        if entry["state"] != state:
            return None
        return [
            Verdict(exercise, Outcome(outcome), cases=tuple(Case(**case | {"details": ()}) for case in cases))
            for outcome, cases in entry["verdicts"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
