"""The source code of phases: their diffs, the modules they add, the methods of their engines. Introduced in phase 1b.

The diff of two phase folders is the lesson, and adjacent phases share identical code. The command line, the chapter
checker and the course's site read both from here. Invariant: sources are read and never imported, so no phase is loaded
for its text.
"""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

import shared
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons

SUFFIXES = (".py", ".toml", ".md")
ENGINE = "engine.py"


def phase_pair(older: str, newer: str) -> tuple[Lesson, Lesson]:
    """Two phases by number; raises ConfigError if one does not exist or the second does not follow the first."""
    before, after = find_lesson(older), find_lesson(newer)
    numbers = [lesson.number for lesson in lessons()]
    if numbers.index(before.number) >= numbers.index(after.number):
        raise ConfigError(
            f"Phase {after.number} does not come after phase {before.number}; give the earlier one first: "
            f"`infer diff {numbers[0]} {numbers[-1]}`."
        )
    return before, after


def diff_lines(older: Lesson, newer: Lesson, *, with_tests: bool = False) -> Iterator[str]:
    """The lines of a unified diff of the two folders, followed by the engine's replaced parts."""
    names = {path.name for lesson in (older, newer) for path in lesson.folder.iterdir() if path.suffix in SUFFIXES}
    chosen = (name for name in names if with_tests or not name.startswith("test_"))
    for name in sorted(chosen, key=lambda name: (name != ENGINE, name.startswith("test_"), name)):
        yield from file_diff(older, newer, name)
    for old, new in replaced_parts(older, newer):
        yield from _unified_diff(module_file(old), module_file(new))


def replaced_parts(older: Lesson, newer: Lesson) -> list[tuple[str, str]]:
    """The older engine's shared modules that the newer one replaces, each with its replacement."""
    known, replaced = _way_to(older), dict[str, str]()
    for old, new in (pair for lesson in _way_to(newer) if lesson not in known for pair in lesson.replaces):
        first = next((name for name, latest in replaced.items() if latest == old), old)
        replaced[first] = new
    return list(replaced.items())


def file_diff(older: Lesson, newer: Lesson, name: str) -> Iterator[str]:
    """The lines of a unified diff of one file that the two folders share."""
    yield from _unified_diff(older.folder / name, newer.folder / name)


def added_modules(older: Lesson, newer: Lesson) -> list[str]:
    """The shared modules that ``newer`` and its predecessors add, without those of ``older``."""
    known = {module for lesson in _way_to(older) for module in lesson.adds}
    return [module for lesson in _way_to(newer) for module in lesson.adds if module not in known]


def first_line(module: str) -> str:
    """The first line of a shared module's docstring, read without importing it."""
    docstring = ast.get_docstring(ast.parse(_text(module_file(module)))) or ""
    return docstring.partition("\n")[0]


def methods(lesson: Lesson) -> dict[str, str]:
    """The source of each method of the phase's Engine, in order, decorators included; each ends with a line break."""
    text = engine_file(lesson).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    return {name: "".join(lines[start:end]).rstrip("\n") + "\n" for name, (start, end) in method_extents(text).items()}


def method_extents(text: str) -> dict[str, tuple[int, int]]:
    """For each method of the class Engine, its lines [start, end), decorators included."""
    found: dict[str, tuple[int, int]] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or node.name != "Engine":
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.end_lineno is not None:
                start = min([item.lineno, *(decorator.lineno for decorator in item.decorator_list)])
                found[item.name] = (start - 1, item.end_lineno)
    return found


def engine_file(lesson: Lesson) -> Path:
    """The file that holds the phase's Engine."""
    return lesson.folder / ENGINE


def _way_to(lesson: Lesson) -> list[Lesson]:
    """The chain of phases from the first to this one."""
    way = [lesson]
    while (previous := way[0].previous) is not None:
        way.insert(0, find_lesson(previous))
    return way


def module_file(module: str) -> Path:
    """The file of a shared module, such as ``shared.cache.pool.paged``."""
    base = Path(shared.__path__[0]).joinpath(*module.removeprefix("shared.").split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _unified_diff(old: Path, new: Path) -> Iterator[str]:
    """Labelled by their paths from ``phases`` or ``shared`` on, otherwise by their last three parts."""
    yield from difflib.unified_diff(_lines(old), _lines(new), _label(old), _label(new), lineterm="")


def _label(path: Path) -> str:
    begins = [index for index, part in enumerate(path.parts) if part in ("phases", "shared")]
    return "/".join(path.parts[begins[-1] if begins else -3 :])


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    """The file's text; empty if the phase does not have the file."""
    return path.read_text(encoding="utf-8") if path.exists() else ""
