"""The exercises of the course, read from the markers in ``shared/`` and the tables in ``lesson.toml``.

An exercise is a run of lines inside a function::

    # exercise 03x1: what one token costs, in bytes
    # hint: a key and a value for every layer and every key head
    return 2 * ...
    # end exercise

Its number is the phase's, an x and a count: ``03x1`` is the first of phase 3, ``03.1x1`` the first of phase 3.1.
Invariant: markers and tables name the same exercises, and each lies in a module that its phase brings; anything else is
refused here, before it can reach a learner.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import shared
from shared.errors import ConfigError
from shared.lessons import Lesson, lessons

ROOT = Path(shared.__path__[0]).resolve().parent
"""The folder that holds ``shared``, ``phases`` and ``tutorial``."""

_NUMBER = r"\d\d[a-z]?(?:\.\d+)?x[1-9]\d*"
_FORM = "its phase, an x and a count from 1, such as 06x1 or 03.1x2"
_BEGIN = re.compile(rf"(\s*)# exercise ({_NUMBER}): (\S.*)")
_MEANT = re.compile(r"\s*# exercise \d.*")
_HINT = re.compile(r"\s*# hint: (\S.*)")
_END = re.compile(r"\s*# end exercise")


@dataclass(frozen=True)
class Region:
    """The marked lines of one exercise in a source; line indices count from 0."""

    number: str
    title: str
    hints: tuple[str, ...]
    target: str  # the function around it, such as ContiguousView.attend
    begin: int  # of the marker
    end: int  # of "# end exercise"
    indent: str
    lines: tuple[str, ...]  # what stands between the markers, hints included

    @property
    def message(self) -> str:
        """What a gap raises."""
        return f"exercise {self.number}: {self.title}"


@dataclass(frozen=True)
class Exercise:
    """One exercise: where it stands in the reference, how long it takes, and the tests that notice it."""

    number: str
    phase: str
    title: str
    hints: tuple[str, ...]
    minutes: int
    tests: tuple[str, ...]  # pytest node ids, from the root
    path: str  # of the module, from the root: shared/cache/view/contiguous.py
    target: str
    processor_seconds: float = 5.0  # that a part of one test may take

    @property
    def message(self) -> str:
        return f"exercise {self.number}: {self.title}"

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


@lru_cache(maxsize=256)  # of more modules than hold exercises
def regions(source: str, where: str = "the source") -> tuple[Region, ...]:
    """The exercises marked in a source, in order; ConfigError for a malformed marker and for markers that do not fit
    together."""
    found: list[Region] = []
    lines = source.splitlines()
    functions: list[tuple[int, int, str]] | None = None
    begin: re.Match[str] | None = None
    start = 0
    for index, line in enumerate(lines):
        match = _BEGIN.fullmatch(line)
        if match is None and _MEANT.fullmatch(line):
            raise ConfigError(
                f"{where}:{index + 1}: `{line.strip()}` does not begin an exercise; write `# exercise NUMBER: title`, "
                f"where NUMBER is {_FORM}."
            )
        if match is None and not (begin and _END.fullmatch(line)):
            continue
        if match is not None:
            if begin is not None:
                raise ConfigError(f"{where}:{index + 1}: exercise {match[2]} begins inside exercise {begin[2]}.")
            begin, start = match, index
            continue
        assert begin is not None
        inside = lines[start + 1 : index]
        hints = [hint[1] for text in inside if (hint := _HINT.fullmatch(text))]
        if len(hints) == len(inside):
            raise ConfigError(f"{where}:{start + 1}: exercise {begin[2]} holds no line of code.")
        functions = _functions(source, where) if functions is None else functions
        around = [name for first, last, name in functions if first <= start and index <= last]
        if not around:
            raise ConfigError(f"{where}:{start + 1}: exercise {begin[2]} must stand inside one function.")
        found.append(Region(begin[2], begin[3], tuple(hints), around[-1], start, index, begin[1], tuple(inside)))
        begin = None
    if begin is not None:
        raise ConfigError(f"{where}:{start + 1}: exercise {begin[2]} has no `# end exercise`.")
    return tuple(found)


@cache
def exercises() -> tuple[Exercise, ...]:
    """Every exercise of every phase, in order; ConfigError where markers and ``lesson.toml`` disagree."""
    found: list[Exercise] = []
    for lesson in lessons():
        marked = {region.number: (path, region) for path in modules_of(lesson) for region in regions(_read(path), path)}
        listed = [entry.number for entry in lesson.exercises]
        if sorted(marked) != sorted(listed):
            raise ConfigError(
                f"Phase {lesson.number}: its modules mark the exercises {_list(sorted(marked, key=order))}, its "
                f"lesson.toml lists {_list(listed)}; they must be the same."
            )
        for count, entry in enumerate(lesson.exercises, start=1):
            path, region = marked[entry.number]
            if entry.number != f"{lesson.number}x{count}":
                raise ConfigError(f"Phase {lesson.number}: exercise {entry.number} should be {lesson.number}x{count}.")
            if not entry.tests:
                raise ConfigError(f"Exercise {entry.number} has no tests in lesson.toml; name those that notice it.")
            found.append(
                Exercise(
                    entry.number,
                    lesson.number,
                    region.title,
                    region.hints,
                    entry.minutes,
                    entry.tests,
                    path,
                    region.target,
                    entry.processor_seconds,
                )
            )
    return tuple(found)


def exercises_of(lesson: Lesson) -> tuple[Exercise, ...]:
    """The exercises of one phase; ConfigError if it has none."""
    found = tuple(exercise for exercise in exercises() if exercise.phase == lesson.number)
    if not found:
        phases = sorted({exercise.phase for exercise in exercises()})
        raise ConfigError(f"Phase {lesson.number} has no exercises; phases that have are {', '.join(phases)}.")
    return found


def find_exercise(number: str) -> Exercise:
    """An exercise by its number, written 03x1 or 3x1; ConfigError with the form of a number, or those that exist."""
    wanted = number.strip().lower()
    wanted = wanted if wanted[:2].isdigit() else f"0{wanted}"
    for exercise in exercises():
        if exercise.number == wanted:
            return exercise
    if not re.fullmatch(_NUMBER, wanted):
        raise ConfigError(f"There is no exercise {number!r}; the number of an exercise is {_FORM}.")
    known = ", ".join(exercise.number for exercise in exercises())
    raise ConfigError(f"There is no exercise {number!r}; there are {known}.")


def order(number: str) -> tuple[str, int]:
    """What exercises are sorted by: the phase, then the count as a number."""
    phase, _, count = number.partition("x")
    return phase, int(count)


def source_of(exercise: Exercise) -> str:
    """The source of the module that holds the exercise."""
    return _read(exercise.path)


def reference(exercise: Exercise) -> tuple[str, Region]:
    """The source of the module that holds the exercise, and its region there."""
    source = source_of(exercise)
    return source, next(region for region in regions(source, exercise.path) if region.number == exercise.number)


def function_lines(source: str, target: str) -> list[str]:
    """One function's lines, by its dotted name, without exercise markers and hints; none if it cannot be found."""
    lines = source.splitlines()
    try:
        found = next((lines[first : last + 1] for first, last, name in _functions(source, "") if name == target), [])
    except ConfigError:
        return []
    return [line for line in found if not any(form.fullmatch(line) for form in (_BEGIN, _HINT, _END))]


def enclosing_function(source: str, line: int, where: str = "the source") -> str:
    """The dotted name of the innermost function around a line, which counts from 0; ConfigError if there is none."""
    around = [name for first, last, name in _functions(source, where) if first <= line <= last]
    if not around:
        raise ConfigError(f"{where}:{line + 1} stands in no function.")
    return around[-1]


def modules_of(lesson: Lesson) -> list[str]:
    """Paths of the modules of a phase; a package's own file holds no exercises."""
    paths = (module.replace(".", "/") + ".py" for module in (*lesson.adds, *lesson.beside))
    return [path for path in paths if (ROOT / path).is_file()]


def _functions(source: str, where: str) -> list[tuple[int, int, str]]:
    """First and last line (from 0) and dotted name of every function, outer ones before inner ones."""
    found: list[tuple[int, int, str]] = []

    def walk(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # Markers may stand behind the last statement, which the node does not count.
                found.append((node.lineno - 1, _last_line(lines, node), prefix + node.name))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    lines = source.splitlines()
    try:
        walk(ast.parse(source).body, "")
    except SyntaxError as error:
        raise ConfigError(f"{where}:{error.lineno}: {error.msg}.") from None
    return found


def _last_line(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The last line that belongs to a function, including comments after its last statement."""
    assert node.end_lineno is not None
    last = node.end_lineno - 1
    for index in range(node.end_lineno, len(lines)):
        text = lines[index]
        if text.strip() and len(text) - len(text.lstrip()) <= node.col_offset:
            break
        if text.strip():
            last = index
    return last


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _list(numbers: list[str]) -> str:
    return ", ".join(numbers) or "none"
