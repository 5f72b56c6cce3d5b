"""The line that stands for an exercise's lines wherever a page shows source: ``…  # exercise 09x3``.

A page explains an exercise and does not solve it, so the Markdown has this line alone; the site puts the hidden lines
after it, where one click shows them. Invariant: a folded line names one exercise, and its hidden lines are the
reference's, without hints.
"""

import re

from tutorial.workshop.exercises import find_exercise, reference

_FOLD = re.compile(r"( *)…  # exercise (\S+)")


def fold(number: str, indent: str = "") -> str:
    """The line that stands for the lines of an exercise."""
    return f"{indent}…  # exercise {number}"


def unfolded(line: str) -> tuple[str, list[str]] | None:
    """The number of the exercise that a line stands for, and its lines, indented as the line is; None for other lines.

    Raises ConfigError for an exercise that does not exist.
    """
    match = _FOLD.fullmatch(line)
    if match is None:
        return None
    exercise = find_exercise(match[2])
    _, region = reference(exercise)
    code = [text for text in region.lines if not text.lstrip().startswith("# hint: ")]
    return exercise.number, [match[1] + text.removeprefix(region.indent) if text.strip() else "" for text in code]
