"""The functions whose lines a recording shows, and their source. Introduced in phase 4.

The shown functions are the methods of the phase's engine, the functions of its scheduler, those of the parts that it
replaced, and the functions that every step passes through. Which of them a run executes is known only afterwards, and
only those are written. Functions are found in the loaded modules, so a learner's module is shown as the learner wrote
it.

Invariant: a line of a function belongs to one statement, and the recording has its event at that statement's first
line.
"""

import ast
import hashlib
import importlib
import inspect
import linecache
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import shared
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
"""Parts whose lines run once per layer, and read and write tensors."""
HIDDEN = ("__init__", "stats", "add_request", "register")


@dataclass(frozen=True, eq=False)
class Function:
    """A function's source: consecutive lines of a file, the first of which is its decorator or its ``def``."""

    name: str  # with its class
    path: str  # as the course names it, even if a learner's file replaces it
    first: int  # number of lines[0] in the file
    lines: tuple[str, ...]
    start: int  # number of the line with `def`
    statements: Mapping[int, int]  # number of a line -> that of the first line of its statement

    def statement(self, line: int) -> int:
        """The number of the first line of the statement that contains this line."""
        return self.statements.get(line, line)


def shown_functions(lesson: Lesson, more: Iterable[str] = ()) -> dict[CodeType, Function]:
    """The functions that a recording of the phase shows, by their code.

    Args:
        more: modules, or functions as ``module:name``, in addition to those of every recording. A function whose name
            begins with an underscore is shown only if it is named.
    """
    parts = [new for _, new in lesson.replaces if not new.startswith(ON_DEVICE)]
    found: dict[CodeType, Function] = {}
    for place in (f"{lesson.module_name}.engine", *parts, *STATIONS, *more):
        name, _, wanted = place.partition(":")
        module = importlib.import_module(name)
        path = name.replace(".", "/") + ".py"
        sources = functions_in("".join(linecache.getlines(str(module.__file__))), path)
        for function in _functions(module):
            is_shown = function.__name__ not in HIDDEN and not function.__name__.startswith("_")
            source = sources.get(function.__qualname__)
            if source is not None and (wanted == source.name or (is_shown and not wanted)):
                found[function.__code__] = source
    return found


def functions_in(text: str, path: str) -> dict[str, Function]:
    """The functions of a module's source, and the methods of its classes, by name."""
    lines, body = text.splitlines(), ast.parse(text).body
    found: dict[str, Function] = {}
    bodies = [("", body), *((f"{node.name}.", node.body) for node in body if isinstance(node, ast.ClassDef))]
    for prefix, nodes in bodies:
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                source = tuple(lines[first - 1 : node.end_lineno])
                name = prefix + node.name
                found[name] = Function(name, path, first, source, node.lineno, _statements(node))
    return found


def sources_hash(functions: Iterable[Function]) -> str:
    """A hash of names, paths and lines, whatever the position of the lines in their files."""
    digest = hashlib.sha256()
    for function in functions:
        digest.update("\n".join((function.path, function.name, *function.lines, "")).encode())
    return digest.hexdigest()[:16]


def current_sources(recording: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recording with today's line numbers; None if a function that it shows has changed, so that it is stale."""
    now: list[Function] = []
    for each in recording["functions"]:
        path = each["path"]
        file = Path(shared.__path__[0]).parent / path
        functions = functions_in(file.read_text(encoding="utf-8"), path) if file.exists() else {}
        if each["name"] not in functions:
            return None
        now.append(functions[each["name"]])
    if sources_hash(now) != recording["sources_hash"]:
        return None
    renumbered = [old | {"first": new.first} for old, new in zip(recording["functions"], now, strict=True)]
    return {**recording, "functions": renumbered}


def _statements(function: ast.FunctionDef) -> dict[int, int]:
    """For each line that is not the first of its statement: the first line of the statement."""
    found: dict[int, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            found |= dict.fromkeys(range(node.lineno, max(end, node.lineno) + 1), node.lineno)
    return found


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that the module itself defines, and the methods of its classes, without properties."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members: Iterable[Any] = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            function = inspect.unwrap(plain) if callable(plain) else None
            if isinstance(function, FunctionType) and _is_in(function, module):
                yield function


def _is_in(function: FunctionType, module: ModuleType) -> bool:
    """Whether its source is in the module's file; methods that dataclasses generate have none."""
    return module.__file__ is not None and Path(function.__code__.co_filename) == Path(module.__file__)
