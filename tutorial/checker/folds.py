"""The line that stands for an exercise's lines wherever a page shows source: ``…  # exercise 09x3``.

A page explains an exercise and does not solve it, so the Markdown has this line alone; the site puts the hidden lines
after it, where one click shows them. ``infer diff`` has the line in place of all lines below the marker, hints
included. Invariant: a folded line names one exercise, and its hidden lines are the reference's, without hints.
"""

import re
from collections.abc import Iterable, Iterator

from tutorial.workshop.exercises import ROOT, find_exercise, reference, regions

_FOLD = re.compile(r"( *)…  # exercise (\S+)")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


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


def folded_diff(lines: Iterable[str]) -> Iterator[str]:
    """The lines of unified diffs of the repository's files, with a fold for each run of lines of an exercise that have
    the same sign."""
    folds: dict[str, dict[int, str]] = {"-": {}, "+": {}}  # of the older file, and of the newer: by line, from 1
    number, left = {"-": 0, "+": 0}, {"-": 0, "+": 0}  # the next line of each, and how many the hunk still has
    last = ""
    for line in lines:
        if not any(left.values()):
            if hunk := _HUNK.match(line):
                number = {"-": int(hunk[1]), "+": int(hunk[3])}
                left = {"-": int(hunk[2] or 1), "+": int(hunk[4] or 1)}
            elif line.startswith(("--- ", "+++ ")):
                folds[line[0]] = _folds(line[4:])
            last = ""
            yield line
            continue
        sides = [side for side in "-+" if line[:1] in (side, " ")]
        found = [fold_of for side in sides if (fold_of := folds[side].get(number[side]))]
        for side in sides:
            number[side] += 1
            left[side] -= 1
        shown = line[:1] + found[-1] if found else line
        if not found or shown != last:
            yield shown
        last = shown if found else ""


def _folds(path: str) -> dict[int, str]:
    """The folded line of each line below a marker in a file of the repository, by its number from 1."""
    file = ROOT / path
    if not file.is_file():
        return {}
    found = regions(file.read_text(encoding="utf-8"), path)
    return {
        line + 1: fold(region.number, region.indent) for region in found for line in range(region.begin + 1, region.end)
    }
