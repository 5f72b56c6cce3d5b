"""Finds the moment that an address names in a recording, and its state. Introduced in phase 4.

Addresses such as ``#step=7&line=schedule`` are used in chapters and in the page. Invariant: the page's script
(``page/replay.js``) finds the same event.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from shared.tracing.steps.patches import State, applied


def find(recording: Mapping[str, Any], step: int, line: str = "") -> int | None:
    """The index of the event; None if there is no such step, or no such line in it.

    The first event of the step in a function of that name; if there is none, the first on a line that contains the
    text. Without ``line``, the first event of the step.
    """
    steps, events = recording["steps"], recording["events"]
    if not 0 <= step < len(steps):
        return None
    first = steps[step]["first"]
    after = steps[step + 1]["first"] if step + 1 < len(steps) else len(events)
    if not line:
        return first
    named = (event for event in range(first, after) if code_of(recording, event)[0]["name"].rpartition(".")[2] == line)
    holding = (event for event in range(first, after) if line in text_of(recording, event))
    return next(named, next(holding, None))


def code_of(recording: Mapping[str, Any], event: int) -> tuple[dict[str, Any], int]:
    """The function of an event, and the offset of its line there."""
    function, offset, *_ = recording["lines"][recording["events"][event][0]]
    return recording["functions"][function], offset


def text_of(recording: Mapping[str, Any], event: int) -> str:
    """The line of source that an event executed."""
    function, offset = code_of(recording, event)
    line: str = function["lines"][offset]
    return line


def state_after(recording: Mapping[str, Any], event: int) -> State:
    """The state after an event."""
    patches = (each[2] for each in recording["events"][: event + 1] if len(each) > 2)
    return reduce(applied, patches, recording["state"])
