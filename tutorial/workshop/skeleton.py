"""Gaps: the reference with an exercise's lines taken out, and the way back.

Invariant: a gap is as long as the lines it replaces, so a skeleton and its reference number their lines alike, and a
filled gap moves nothing behind it. A traceback therefore points at the right line whichever of the two ran.
"""

import re
from collections.abc import Collection
from difflib import SequenceMatcher

from tutorial.workshop.exercises import Region, regions

_MARKER = re.compile(r"\s*# exercise (\S+): ")


def gap(region: Region) -> list[str]:
    """The lines that stand in an exercise's place: one that raises, then blank ones."""
    return [f'{region.indent}raise NotImplementedError("{region.message}")'] + [""] * (len(region.lines) - 1)


def skeleton(source: str, numbers: Collection[str]) -> str:
    """The source with these exercises as gaps; their hints go too, since ``infer workshop hint`` gives them."""
    lines = source.split("\n")
    for region in regions(source):
        if region.number in numbers:
            lines[region.begin + 1 : region.end] = gap(region)
    return "\n".join(lines)


def with_gap(text: str, region: Region, *, only_if_untouched: bool = False) -> str | None:
    """A learner's text with a gap between the markers of one exercise; None if the markers are not there.

    With ``only_if_untouched`` also None if what stands between them is no longer the reference's.
    """
    lines = text.split("\n")
    begin = next((index for index, line in enumerate(lines) if line.strip() == f"# {region.message}"), None)
    if begin is None:
        return None
    end = next((index for index in range(begin, len(lines)) if lines[index].strip() == "# end exercise"), None)
    if end is None or (only_if_untouched and tuple(lines[begin + 1 : end]) != region.lines):
        return None
    lines[begin + 1 : end] = gap(region)
    return "\n".join(lines)


def has_gap(text: str, region: Region) -> bool:
    """Whether the text, a learner's, still raises for this exercise."""
    return _find_gap(text.split("\n"), region) is not None


def filled(text: str, source: str) -> tuple[str, list[str]]:
    """A learner's text with the reference's lines in the gaps that are left, and the numbers of those exercises."""
    lines = text.split("\n")
    numbers = []
    for region in regions(source):
        place = _find_gap(lines, region)
        if place is None:
            continue
        end = place + 1
        while end < len(lines) and end - place < len(region.lines) and not lines[end].strip():
            end += 1
        lines[place:end] = region.lines
        numbers.append(region.number)
    return "\n".join(lines), numbers


def written_lines(text: str, region: Region) -> str | None:
    """What stands between the markers of one exercise in a learner's text; None if the markers are not there."""
    lines = text.split("\n")
    begin = next((index for index, line in enumerate(lines) if line.strip() == f"# {region.message}"), None)
    if begin is None:
        return None
    end = next((index for index in range(begin, len(lines)) if lines[index].strip() == "# end exercise"), None)
    return None if end is None else "\n".join(lines[begin + 1 : end])


def corresponding_line(text: str, other: str, line: int) -> int | None:
    """The number of the line of ``other`` that is the given line of ``text``, both from 1; None if it has none.

    So a line of a text whose gaps were filled is found in the learner's file, unless it is one of the reference's.
    """
    matcher = SequenceMatcher(None, text.split("\n"), other.split("\n"), autojunk=False)
    for start, start_of_other, size in matcher.get_matching_blocks():
        if start < line <= start + size:
            return start_of_other + line - start
    return None


def exercise_around(text: str, line: int) -> str | None:
    """The number of the exercise whose markers stand around a line of a text, counted from 1; None outside of any."""
    for before in reversed(text.split("\n")[:line]):
        if before.strip() == "# end exercise":
            return None
        if found := _MARKER.match(before):
            return found[1]
    return None


def _find_gap(lines: list[str], region: Region) -> int | None:
    raising = gap(region)[0].strip()
    return next((index for index, line in enumerate(lines) if line.strip() == raising), None)
