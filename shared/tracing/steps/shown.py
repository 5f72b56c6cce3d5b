"""The functions whose lines a recording shows, and their source. Introduced in phase 4.

Shown are the methods of the phase's engine, the functions of the parts that the phase replaced or added, and the
stations that every step passes. Which of them a run has executed is known afterwards, and only those are written.
Functions are found in the loaded modules, so a learner's module is shown as the learner wrote it.

Invariant: a line of a function belongs to one statement, at whose first line the recording has its event.
"""

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shared.lessons import Lesson

STATIONS = (
    "shared.scheduling.admission:admit",
    "shared.scheduling.growth:grow",
    "shared.scheduling.growth:preempt",
    "shared.engine.batch:Batch.of",
    "shared.scheduling.scheduler:Scheduler.commit",
    "shared.scheduling.drafts:commit_drafts",
    "shared.scheduling.next_tokens:commit_next_tokens",
)
"""Functions that are shown in each phase that runs them, as ``module:name``."""
ON_DEVICE = "shared.cache.view."
"""Parts whose lines run once a layer, and read and write tensors."""
HIDDEN = {"__init__", "stats", "add_request", "register"}


@dataclass(frozen=True, eq=False)
class Function:
    """A function's source: true lines of a file, the first of which is its decorator or its ``def``."""

    name: str
    path: str  # as the course names it, also if a learner's file stands in its place
    first: int  # number of lines[0] in the file
    lines: tuple[str, ...]
    statements: dict[int, int]  # first line of the statement to which a line belongs, by number in the file
    start: int  # the number of the line with `def`

    @classmethod
    def of(cls, function: FunctionType, module: ModuleType) -> "Function":
        """Read from the file that was loaded."""
        lines, first = inspect.getsourcelines(function)
        node = ast.parse(textwrap.dedent("".join(lines))).body[0]
        statements: dict[int, int] = {}
        for statement in ast.walk(node):
            if isinstance(statement, ast.stmt):
                body = getattr(statement, "body", None)
                end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
                for line in range(statement.lineno, max(end, statement.lineno) + 1):
                    statements.setdefault(first + line - 1, first + statement.lineno - 1)
        path = module.__name__.replace(".", "/") + ".py"
        text = tuple(line.rstrip("\n") for line in lines)
        return cls(function.__qualname__, path, first, text, statements, first + node.lineno - 1)

    def statement(self, line: int) -> int:
        """The number of the first line of the statement that has this line."""
        return self.statements.get(line, line)


def shown_functions(lesson: Lesson, more: Iterable[str] = ()) -> dict[CodeType, Function]:
    """The functions that a recording of the phase shows, by their code.

    Args:
        more: modules, or functions as ``module:name``, beside those of every recording.
    """
    own = [new for _, new in lesson.replaces if not new.startswith(ON_DEVICE)]
    found: dict[CodeType, Function] = {}
    for place in (f"{lesson.module_name}.engine", *own, *STATIONS, *more):
        name, _, wanted = place.partition(":")
        module = importlib.import_module(name)
        for function in _functions(module):
            if function.__name__ not in HIDDEN and wanted in ("", function.__qualname__):
                found[function.__code__] = Function.of(function, module)
    return found


def sources_hash(functions: Iterable[Function]) -> str:
    """Of names, paths and lines, wherever they stand in their files."""
    digest = hashlib.sha256()
    for function in functions:
        digest.update("\n".join((function.path, function.name, *function.lines, "")).encode())
    return digest.hexdigest()[:16]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that the module itself defines."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members: Iterable[Any] = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = inspect.unwrap(_plain(member)) if callable(_plain(member)) else None
            if isinstance(function, FunctionType) and _is_in(function, module):
                yield function


def _plain(member: Any) -> Any:
    """The function of a property, class method or static method."""
    if isinstance(member, property):
        return member.fget
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def _is_in(function: FunctionType, module: ModuleType) -> bool:
    """Whether its source stands in the module's file; methods that dataclasses make have none."""
    return module.__file__ is not None and Path(function.__code__.co_filename) == Path(module.__file__)
