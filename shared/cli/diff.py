"""``infer diff``: what one phase changed. Introduced in phase 1b.

The difference of two phase folders is the lesson; the shared modules that the newer one brings are the rest of it.
"""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import shared
from shared.cli.terminal import examples, stdout_console
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons

EPILOG = examples("infer diff 01b 02", "infer diff 01b 02 --all", "infer diff 2 3 | less")
SUFFIXES = (".py", ".toml", ".md")
FIRST = "engine.py"
_STYLES = (("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


def diff(
    older: Annotated[str, typer.Argument(help="A phase, such as 01b.")],
    newer: Annotated[str, typer.Argument(help="A later phase, such as 02.")],
    all_files: Annotated[bool, typer.Option("--all", help="Show the tests as well.")] = False,
) -> None:
    """Show the difference of two phases, engine.py first, then the shared modules that the newer one adds."""
    before, after = phase_pair(older, newer)
    console = stdout_console()
    for line in diff_lines(before, after, with_tests=all_files):
        style = next((style for prefix, style in _STYLES if line.startswith(prefix)), "")
        console.print(line, style=style, markup=False, soft_wrap=True)
    added = added_modules(before, after)
    console.print(f"\nshared modules that phase {after.number} adds: {len(added) or 'none'}", style="bold")
    width = max(map(len, added), default=0)
    for module in added:
        console.print(f"  {module:{width}}  {first_line(module)}", markup=False, soft_wrap=True)


def phase_pair(older: str, newer: str) -> tuple[Lesson, Lesson]:
    """Two phases by their numbers; raises ConfigError if one does not exist or the second does not come after."""
    before, after = find_lesson(older), find_lesson(newer)
    numbers = [lesson.number for lesson in lessons()]
    if numbers.index(before.number) >= numbers.index(after.number):
        raise ConfigError(
            f"Phase {after.number} does not come after phase {before.number}; give the earlier one first: "
            f"`infer diff {numbers[0]} {numbers[-1]}`."
        )
    return before, after


def diff_lines(older: Lesson, newer: Lesson, *, with_tests: bool = False) -> Iterator[str]:
    """The lines of a unified diff of the two folders."""
    names = {path.name for lesson in (older, newer) for path in lesson.folder.iterdir() if path.suffix in SUFFIXES}
    chosen = (name for name in names if with_tests or not name.startswith("test_"))
    for name in sorted(chosen, key=lambda name: (name != FIRST, name.startswith("test_"), name)):
        yield from file_diff(older, newer, name)


def file_diff(older: Lesson, newer: Lesson, name: str) -> Iterator[str]:
    """The lines of a unified diff of one file that the two folders share."""
    old, new = older.folder / name, newer.folder / name
    labels = [f"{path.parent.parent.name}/{path.parent.name}/{name}" for path in (old, new)]
    yield from difflib.unified_diff(_lines(old), _lines(new), labels[0], labels[1], lineterm="")


def added_modules(older: Lesson, newer: Lesson) -> list[str]:
    """The shared modules on the way to ``newer`` that are not on the way to ``older``."""
    known = {module for lesson in _way_to(older) for module in lesson.adds}
    return [module for lesson in _way_to(newer) for module in lesson.adds if module not in known]


def first_line(module: str) -> str:
    """The first line of a shared module's docstring, read without importing it."""
    base = Path(shared.__path__[0]).joinpath(*module.removeprefix("shared.").split("."))
    source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(_text(source))) or ""
    return docstring.partition("\n")[0]


def _way_to(lesson: Lesson) -> list[Lesson]:
    """The phases from the first to this one."""
    way = [lesson]
    while (previous := way[0].previous) is not None:
        way.insert(0, find_lesson(previous))
    return way


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    """The file's text; nothing for a file that one of the two phases does not have."""
    return path.read_text(encoding="utf-8") if path.exists() else ""
