"""Lines of code one after the other, those of exercises folded in place. Introduced in phase 3.

Chapters have a line for each exercise that they quote, ``…  # exercise 09x3``; the hidden lines, which the source has,
are put after it. Pages that show whole sources and differences fold the same lines. A fold opens with a click or with
Enter, and needs no script. Invariant: every line of an exercise is on the page, after its fold.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import PurePosixPath

from course_site.code_lines import hanging, indent
from course_site.repository import read
from shared.errors import ConfigError
from tutorial.checker.folds import fold, unfolded
from tutorial.workshop.exercises import regions


@dataclass(frozen=True)
class Line:
    """A line as HTML: what stands before its code, the code, and the number of the exercise whose line it is."""

    code: str
    exercise: str | None = None
    lead: str = ""
    tag: str = "span"
    kind: str = "line"
    attributes: str = ""

    @property
    def html(self) -> str:
        opening = f'{self.tag} class="{self.kind}"{self.attributes}{hanging(self.code)}'
        return f"<{opening}>{self.lead}{self.code}\n</{self.tag}>"


def joined(lines: Iterable[Line], blank: str = "") -> str:
    """The HTML of the lines; ``blank`` is the lead of a fold whose lines have different leads."""
    parts = []
    for is_hidden, group in groupby(lines, key=lambda line: line.exercise is not None):
        block = list(group)
        html = "".join(line.html for line in block)
        parts.append(f'<details class="fold">{_summary(block, blank)}{html}</details>' if is_hidden else html)
    return "".join(parts)


def with_hidden(lines: Iterable[str], num_signs: int = 0) -> list[tuple[str, str | None]]:
    """The lines of a page, for each fold the lines that it hides, with their exercise; each line begins with so many
    signs of a diff.
    """
    found: list[tuple[str, str | None]] = []
    for line in lines:
        sign, code = line[:num_signs], line[num_signs:]
        if (hidden := unfolded(code)) is None:
            found.append((line, None))
        else:
            found += [(sign + text, hidden[0]) for text in hidden[1]]
    return found


def exercise_lines(path: str) -> dict[int, str]:
    """The exercise, or the bug hunt, of each line of a file that gives it away, hints included; lines count from 0.

    They are the reference's lines in a module, and all that a hunt has in its table. Tables of known mistakes have no
    page.
    """
    if path.startswith("tutorial/bugs/") and path.endswith(".toml"):
        return _lines_of_hunts(read(path), PurePosixPath(path).stem)
    try:
        marked = regions(read(path), path) if path.startswith("shared/") and path.endswith(".py") else []
    except ConfigError:  # which the tests of the exercises tell
        return {}
    return {line: region.number for region in marked for line in range(region.begin + 1, region.end)}


def _lines_of_hunts(table: str, phase: str) -> dict[int, str]:
    found: dict[int, str] = {}
    count = 0
    for index, line in enumerate(table.split("\n")):
        if line == "[[bugs]]":
            count += 1
        elif count and line.strip():
            found[index] = f"{phase}b{count}"
    return found


def _summary(block: list[Line], blank: str) -> str:
    """The line that is shown for the hidden ones, indented as the leftmost of them."""
    leads = {line.lead for line in block}
    numbers = ", ".join(dict.fromkeys(line.exercise or "" for line in block))
    columns = " " * min((indent(line.code) for line in block if line.code.strip()), default=0)
    said = fold(numbers) if "x" in numbers else f"…  # bug {numbers}"
    shown = f"{columns}<span>{escape(said)}</span>"
    lead = leads.pop() if len(leads) == 1 else blank
    return f'<summary class="line"{hanging(shown)}>{lead}{shown}\n</summary>'
