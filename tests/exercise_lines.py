"""The lines of exercises as a page would show them, to find those that give an exercise away."""

import re
from functools import cache
from pathlib import Path

from tutorial.workshop.exercises import regions

ROOT = Path(__file__).parents[1]
SHORTEST = 12
"""Characters of a line, without spaces, that say something: `return False` and `if blocks is None:` are everywhere."""


def plain(line: str) -> str:
    """A line without spaces and comment."""
    return re.sub(r"\s+", "", re.sub(r"\s#\s.*", "", line))


@cache
def exercise_lines() -> dict[str, str]:
    """The exercise of each line of code, as `plain` gives it; without short ones and those that other code has too."""
    inside, outside = dict[str, str](), set[str]()
    for folder in ("shared", "phases"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            exercise_of = {n: found.number for found in regions(text) for n in range(found.begin, found.end + 1)}
            for number, line in enumerate(text.splitlines()):
                if number not in exercise_of:
                    outside.add(plain(line))
                elif len(plain(line)) >= SHORTEST and not line.lstrip().startswith("#"):
                    inside[plain(line)] = exercise_of[number]
    return {line: exercise for line, exercise in inside.items() if line not in outside}


def given_away(text: str) -> list[str]:
    """The lines of a text that give an exercise away: code, code after the sign of a diff, and code in a sentence."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        shown = [line, re.sub(r"^\s*[+-] ?", "", line), *re.findall(r"`([^`]+)`", line)]
        hits = {exercise_lines()[code] for code in map(plain, shown) if code in exercise_lines()}
        found += [f"line {number} is of exercise {exercise}: {line.strip()}" for exercise in sorted(hits)]
    return found
