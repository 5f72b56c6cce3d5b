"""How a difference between page and repository is reported.

Invariant: what the diff shows is what ``--fix`` would write.
"""

import difflib
from collections.abc import Sequence

from tutorial.checker.chapter import Edit, Fence, Problem


def readable_diff(shown: Sequence[str], found: Sequence[str]) -> str:
    """A diff from the page's lines to those that were found."""
    lines = difflib.unified_diff(list(shown), list(found), "on the page", "found", lineterm="", n=2)
    return "\n".join(f"    {line}".rstrip() for line in lines)


def changed(
    fence: Fence, found: list[str], message: str, *, first: int = 0, last: int | None = None, line: int | None = None
) -> list[Problem]:
    """A problem, with its edit, if the body's lines ``[first, last)`` are not ``found``; otherwise none.

    ``line`` is where the problem is reported, by default where the fence opens.
    """
    shown = [line.rstrip() for line in fence.body[first:last]]
    found = [line.rstrip() for line in found]
    while shown and not shown[-1]:
        shown.pop()
    if shown == found:
        return []
    edit: Edit | None = fence.replaced(found, first, first + len(shown))
    if not fence.can_hold(found):
        message, edit = f"{message}, and would end the fence; open and close it with more backticks", None
    return [Problem(line or fence.line, f"{message}\n{readable_diff(shown, found)}", edit)]
