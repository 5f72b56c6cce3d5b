"""A unified diff as HTML: lines shaded by what happened to them, code coloured as code. Introduced in phase 3.

Where the diff says which files and lines it compares, whole files are coloured and the diff's lines taken from them, so
that a hunk which begins inside a docstring looks like a docstring. Invariant: the text, signs included, is that of the
diff; only hunk headers are told in words.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

from course_site.folds import Line, exercise_lines, joined, with_hidden
from course_site.repository import ROOT, enclosing, read

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
_TAGS = {"+": "ins", "-": "del", " ": "span"}
FRAGMENT = "fragment.py"


@dataclass(frozen=True)
class FileDiff:
    """What happened to one file: its name before and after, and the lines from the first hunk header on."""

    older: str
    newer: str
    lines: tuple[str, ...]

    @property
    def num_added(self) -> int:
        return sum(line.startswith("+") for line in self.lines)

    @property
    def num_removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines)

    def html(self) -> str:
        """The lines as a highlighted block, those of exercises folded."""
        lines = with_hidden(self.lines, num_signs=1)
        texts = [line for line, _ in lines]
        before, after = _Side(self.older, texts, " -"), _Side(self.newer, texts, " +")
        rows = []
        for line, exercise in lines:
            if hunk := _HUNK.match(line):
                before.go_to(int(hunk[1]))
                after.go_to(int(hunk[2]))
                rows.append(Line(escape(_place(self.newer, int(hunk[2]))), kind="hunk"))
                continue
            sign = line[:1] or " "
            old, of_old = before.next() if sign in " -" else ("", None)
            new, of_new = after.next() if sign in " +" else ("", None)
            tag = _TAGS.get(sign, "span")
            rows.append(Line(new or old, exercise or of_new or of_old, _sign(sign), tag))
        body = joined(rows, _sign(" "))
        return f'<div class="highlight-diff notranslate"><div class="highlight"><pre>{body}</pre></div></div>'


def split_files(lines: Iterable[str]) -> list[FileDiff]:
    """The files of a diff, in its order; a diff that names no files is one fragment."""
    lines = list(lines)
    heads = [
        index
        for index, (old, new, hunk) in enumerate(zip(lines, lines[1:], lines[2:], strict=False))
        if old.startswith("--- ") and new.startswith("+++ ") and _HUNK.match(hunk)
    ]
    if not heads:
        return [FileDiff(FRAGMENT, FRAGMENT, tuple(lines))] if lines else []
    ends = [*heads[1:], len(lines)]
    return [
        FileDiff(lines[head][4:], lines[head + 1][4:], tuple(lines[head + 2 : end]))
        for head, end in zip(heads, ends, strict=True)
    ]


class _Side:
    """One of the two texts, coloured line by line, with the exercises of its lines; reads on from where it is."""

    def __init__(self, path: str, lines: list[str], signs: str) -> None:
        whole = (ROOT / path).is_file()
        self._is_whole = whole
        self._lines = coloured_lines(
            read(path) if whole else "\n".join(line[1:] for line in lines if (line[:1] or " ") in signs), path
        )
        self._exercises = exercise_lines(path) if whole else {}
        self._index = 0

    def go_to(self, line: int) -> None:
        if self._is_whole:
            self._index = max(line - 1, 0)

    def next(self) -> tuple[str, str | None]:
        line = self._lines[self._index] if self._index < len(self._lines) else ""
        exercise = self._exercises.get(self._index)
        self._index += 1
        return line, exercise


@cache
def coloured_lines(text: str, path: str) -> tuple[str, ...]:
    """A file's lines as HTML, coloured by what its name says that it is."""
    try:
        lexer = get_lexer_for_filename(path, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return tuple(escape(line) for line in text.splitlines())
    return tuple(highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n"))


def _sign(sign: str) -> str:
    return f'<span class="sign">{escape(sign)}</span>'


def _place(path: str, line: int) -> str:
    """A hunk's place in words."""
    name = enclosing(path, line) if path.endswith(".py") and (ROOT / path).is_file() else ""
    return f"line {line}, in {name}" if name else f"line {line}"
