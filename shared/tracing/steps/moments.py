"""Finds the moment that an address names in a recording, and its state. Introduced in phase 4.

An address such as ``#step=7&line=schedule`` stands in chapters and in the page: ``step``; ``line``, a function or a
text in one of its lines; or ``event``, the number of an event of the step. ``ask`` names a question, whose step and
line are meant if the address names no step. Invariant: the page's script (``page/replay.js``) finds the same event.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any
from urllib.parse import parse_qsl

from shared.tracing.steps.patches import State, applied


def named(recording: Mapping[str, Any], address: str) -> int | None:
    """The index of the event that an address names; None if there is no such question, step, line or event."""
    values = dict(parse_qsl(address, keep_blank_values=True))
    if "ask" in values:
        asked = [each for each in recording.get("questions", ()) if each["name"] == values["ask"]]
        if not asked:
            return None
        if "step" not in values:
            values = {"step": str(asked[0]["step"]), "line": asked[0].get("line", ""), **values}
    step = values.get("step", "0")
    if not step.isdecimal():
        return None
    if (event := values.get("event")) is None:
        return find(recording, int(step), values.get("line", ""))
    within = events_of(recording, int(step))
    return within[int(event)] if event.isdecimal() and int(event) < len(within) else None


def find(recording: Mapping[str, Any], step: int, line: str = "") -> int | None:
    """The index of the event; None if there is no such step, or no such line in it.

    The first event of the step in a function of that name; if there is none, the first on a line that contains the
    text. Without ``line``, the first event of the step.
    """
    within = events_of(recording, step)
    if not line:
        return next(iter(within), None)
    calls = (event for event in within if code_of(recording, event)[0]["name"].rpartition(".")[2] == line)
    holding = (event for event in within if line in text_of(recording, event))
    return next(calls, next(holding, None))


def events_of(recording: Mapping[str, Any], step: int) -> range:
    """The indices of a step's events; empty if there is no such step."""
    firsts = [*(each["first"] for each in recording["steps"]), len(recording["events"])]
    return range(firsts[step], firsts[step + 1]) if 0 <= step < len(firsts) - 1 else range(0)


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
