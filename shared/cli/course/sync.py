"""Copies a method of Engine from one phase to all that share it. Introduced in phase 2.

Each phase repeats the loop so that it can be read on its own; a method that two neighbours share has identical source
in both. A fix must therefore reach every copy. Invariant: only the lines of that method change, and only in phases that
a chain of neighbours connects to the source, without a phase whose `changes` names the method.
"""

from pathlib import Path

from shared.errors import ConfigError, InferError
from shared.lesson_source import engine_file, method_extents, methods
from shared.lessons import Lesson, find_lesson, lessons


def sync_method(source: Lesson, method: str, *, dry_run: bool = False) -> tuple[list[Path], list[Lesson]]:
    """Write ``method`` of the source's Engine into the phases that share it.

    Returns the files that differed, and all phases that share the method, including the source, in order of number.
    Raises ConfigError if the source has no such method, InferError if a file cannot be written.
    """
    wanted = methods(source).get(method)
    if wanted is None:
        known = ", ".join(methods(source)) or "none"
        raise ConfigError(f"Engine of phase {source.number} has no method {method!r}; its methods are {known}.")
    sharing = sharing_phases(source, method)
    changed = []
    for lesson in sharing:
        path = engine_file(lesson)
        text = path.read_text(encoding="utf-8")
        start, end = method_extents(text)[method]
        lines = text.splitlines(keepends=True)
        replaced = "".join([*lines[:start], wanted, *lines[end:]])
        if replaced == text:
            continue
        changed.append(path)
        if not dry_run:
            try:
                path.write_text(replaced, encoding="utf-8")
            except OSError as error:
                raise InferError(
                    f"{path} cannot be written ({error.strerror}); run `infer phases sync` in a checkout."
                ) from error
    return changed, sharing


def sharing_phases(source: Lesson, method: str) -> list[Lesson]:
    """The phases whose copy of the method must equal the source's, including the source."""
    found, open_ends = {source.number}, [source]
    while open_ends:
        lesson = open_ends.pop()
        for neighbour in _neighbours(lesson, method):
            if neighbour.number not in found:
                found.add(neighbour.number)
                open_ends.append(neighbour)
    return [lesson for lesson in lessons() if lesson.number in found]


def newest_with(method: str) -> Lesson:
    """The newest phase of the main line whose Engine has the method; raises ConfigError if there is none."""
    having = [lesson for lesson in lessons() if not lesson.is_side_track and method in methods(lesson)]
    if not having:
        known = sorted({name for lesson in lessons() for name in methods(lesson)})
        raise ConfigError(f"No phase's Engine has a method {method!r}; choose one of {', '.join(known)}.")
    return having[-1]


def _neighbours(lesson: Lesson, method: str) -> list[Lesson]:
    """The phases directly before or after this one that share the method with it."""
    before = [find_lesson(lesson.previous)] if lesson.previous else []
    after = [other for other in lessons() if other.previous and find_lesson(other.previous) == lesson]
    pairs = [(other, lesson) for other in before] + [(other, other) for other in after]
    return [other for other, newer in pairs if method not in newer.changes and method in methods(other)]
