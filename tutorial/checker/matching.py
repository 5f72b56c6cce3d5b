"""Compares the output that a page shows with what was printed.

A shown line ``...`` stands for any number of lines, ``...`` inside a line for any text. All else is exact, except for
what differs from run to run and from machine to machine. On both sides, before lines are compared,

- spaces at the end of a line and empty lines at the end of an output go, and so do colours;
- of a carriage return only what follows it stays, as on a terminal;
- the number of a time (``1.8 s``, ``12 ms``, ``3 seconds``) and of a rate (``18.3 tokens/s``, ``54 ms/token``,
  ``200 MB/s``) counts as equal to any other, with the unit behind the number, or before it in a table
  (``load, seconds │ 1.8``); a whole clock behind it (``(0:01:05)``) goes;
- on a line with a time or a rate, so does a ratio (``3.5×``) and a drawn bar (``████▋``);
- so does a size (``512 MB``) on a line that speaks of a peak or of resident memory; other sizes and counts of bytes
  follow from shapes, and are exact;
- so does a progress (``[ 50%]``, ``50%|██``);
- so does the first name below ``/tmp``; where something was replaced on a line, a run of spaces or of ``=`` and ``-``
  counts as one, since columns move with the numbers.

The paths of the machine are replaced when the output is captured (`surroundings.py`), never in the page: a page that
shows one does not match.
"""

import re
from collections.abc import Sequence

ELISION = "..."
_NUMBER = r"(?<![\w.,])(?>\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)"
_TIME = r"(?:ns|µs|us|ms|s|seconds?|milliseconds?)"
_RATE = r"(?:[A-Za-z]+/s|tokens? (?:a|per) second|(?:ns|µs|us|ms|s)/[a-z]+|(?:ns|µs|us|ms) (?:a|per) [a-z]+)"
_MEASURED = re.compile(
    rf"{_NUMBER}(?=\s?(?:{_RATE}|{_TIME})(?![\w/]))"
    rf"|(?P<label>\b(?:{_RATE}|(?:milli)?seconds|ms)\s*(?:[│┃|:=]|\s\s)\s*){_NUMBER}(?!\s?[A-Za-z%])"
)
_CLOCK = re.compile(r" ?\(\d+:\d\d:\d\d\)")
_RATIO = re.compile(rf"{_NUMBER}(?=×)")
_BAR = re.compile(r"[█▉▊▋▌▍▎▏]+")
_SIZE = re.compile(rf"{_NUMBER}(?=\s?(?:[KMGT]i?B|bytes|B)\b)")
_PROGRESS = re.compile(r"\d+(?:\.\d+)?(?=%(?:\||\s*\]))")
_PADDED_PROGRESS = re.compile(r"\[ *#%")
_TEMPORARY = re.compile(r"/tmp/[\w.-]+")
_PEAK = re.compile(r"\b(?:peak|resident|rss)\b", re.IGNORECASE)
_RUN = re.compile(r" {2,}|={2,}|-{2,}|─{2,}")
_COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")

_REPLACE, _DROP, _INSERT = 2, 3, 3  # to replace a line is cheaper than to drop it and let an elision take its place


def printed_lines(text: str) -> list[str]:
    """What a terminal without colours would show of ``text``, line by line."""
    lines = [_COLOUR.sub("", line).removesuffix("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def masked(line: str) -> str:
    """The line with ``#`` for what may differ from run to run."""
    line = line.rstrip()
    result = _MEASURED.sub(lambda match: f"{match['label'] or ''}#", line)
    if result != line:
        result = _BAR.sub("#", _RATIO.sub("#", _CLOCK.sub("", result)))
    if _PEAK.search(result):
        result = _SIZE.sub("#", result)
    result = _PADDED_PROGRESS.sub("[#%", _PROGRESS.sub("#", result))
    result = _TEMPORARY.sub("/tmp/#", result)
    return _RUN.sub(lambda match: match[0][0], result) if result != line else line


def line_matches(shown: str, printed: str) -> bool:
    """Whether one shown line stands for one printed line."""
    return _elided(shown.rstrip(), printed.rstrip()) or _elided(masked(shown), masked(printed))


def reconcile(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The text nearest to ``shown`` that matches ``printed``: ``shown`` itself exactly if it does.

    Shown lines that stand for a printed line are kept as they are, elisions among them; only the others change. It is
    the cheapest way through the table of both, as for an edit distance.
    """
    shown = list(shown)
    while shown and not shown[-1].strip():
        shown.pop()
    rows, columns = len(shown), len(printed)
    is_elision = [line.strip() == ELISION for line in shown]
    # cost[i][j]: of bringing shown[i:] to match printed[j:]
    cost = [[0] * (columns + 1) for _ in range(rows + 1)]
    cost[rows] = [_INSERT * (columns - j) for j in range(columns + 1)]
    same = [[not is_elision[i] and line_matches(shown[i], printed[j]) for j in range(columns)] for i in range(rows)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns + 1)):
            ways = [cost[i + 1][j] if is_elision[i] else cost[i + 1][j] + _DROP]
            if j < columns:
                if is_elision[i]:
                    ways.append(cost[i][j + 1])
                else:
                    ways.append(cost[i + 1][j + 1] + (0 if same[i][j] else _REPLACE))
                    ways.append(cost[i][j + 1] + _INSERT)
            cost[i][j] = min(ways)
    found: list[str] = []
    i = j = 0
    while i < rows or j < columns:
        if i == rows:
            found.append(printed[j])
            j += 1
        elif is_elision[i]:
            if cost[i][j] == cost[i + 1][j]:
                found.append(shown[i])
                i += 1
            else:
                j += 1
        elif j < columns and cost[i][j] == cost[i + 1][j + 1] + (0 if same[i][j] else _REPLACE):
            found.append(shown[i] if same[i][j] else printed[j])
            i, j = i + 1, j + 1
        elif j < columns and cost[i][j] == cost[i][j + 1] + _INSERT:
            found.append(printed[j])
            j += 1
        else:
            i += 1
    return found


def _elided(pattern: str, text: str) -> bool:
    """Whether ``text`` is ``pattern`` with any text in the place of each ``...``."""
    if ELISION not in pattern:
        return pattern == text
    first, *middle, last = pattern.split(ELISION)
    if not text.startswith(first) or len(text) < len(first) + len(last) or not text.endswith(last):
        return False
    start, end = len(first), len(text) - len(last)
    for part in middle:
        place = text.find(part, start, end)
        if place < 0:
            return False
        start = place + len(part)
    return True
