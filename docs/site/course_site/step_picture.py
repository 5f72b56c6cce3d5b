"""A moment of a recording as a still picture: the lines around the one that runs, and the state beside them.

Introduced in phase 4. The picture is inline SVG without colours of its own; those of light and dark stand in
`static/course.css`. Invariant: lines of exercises are folded, as on every page.
"""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from shared.tracing.steps.moments import code_of, state_after

WIDTH, LINE, CODE, COLUMNS = 680, 17, 400, 54
"""Pixels of the picture, of the height of a line, and of the code's width; characters of a line."""
MOST_LINES = 9
SQUARE = 15
_BEGIN = re.compile(r"\s*# exercise (\S+):")


def picture(recording: Mapping[str, Any], event: int) -> str:
    """The SVG of the moment after an event."""
    function, _ = code_of(recording, event)
    lines = list(_window(recording, event))
    requests = list(_bars(recording, event))
    blocks, rows = _blocks(recording, event, top=LINE * len(recording["requests"]) + 12)
    height = max(LINE * (len(lines) + 1), rows) + 16
    step = max(number for number, each in enumerate(recording["steps"]) if each["first"] <= event)
    label = f"Phase {recording['phase']}, step {step}: the line that runs in {function['name']}, and the requests"
    body = "".join([f'<text class="title" x="10" y="18">{escape(function["name"])}</text>', *lines, *requests, *blocks])
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _window(recording: Mapping[str, Any], event: int) -> Iterator[str]:
    """The lines around the one that runs, under the function's name."""
    function, offset = code_of(recording, event)
    shown, marked = _folded(function["lines"], offset)
    begin = max(0, min(marked - MOST_LINES // 2, len(shown) - MOST_LINES))
    shown = shown[begin : begin + MOST_LINES]
    margin = min(len(text) - len(text.lstrip()) for text in shown if text.strip())
    for row, text in enumerate(shown, start=1):
        y = LINE * row + 6
        if row - 1 == marked - begin:
            yield f'<rect class="mark" x="4" y="{y}" width="{CODE - 8}" height="{LINE}"/>'
        text = text[margin:]
        short = text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"
        yield f'<text class="code" x="10" y="{y + 12}">{escape(short)}</text>'


def _folded(lines: list[str], offset: int) -> tuple[list[str], int]:
    """The lines with those of exercises folded, and which of them stands for the one at ``offset``."""
    shown: list[str] = []
    marked, is_hidden = 0, False
    for number, line in enumerate(lines):
        is_hidden = is_hidden and line.strip() != "# end exercise"
        if not is_hidden:
            shown.append(line)
        if number == offset:
            marked = len(shown) - 1
        if match := _BEGIN.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            shown.append(f"{indent}…  # exercise {match[1]}")
            is_hidden = True
    return shown, marked


def _bars(recording: Mapping[str, Any], event: int) -> Iterator[str]:
    """For each request its tokens: computed, in this step, known."""
    state = state_after(recording, event)
    last = state_after(recording, len(recording["events"]) - 1)
    longest = max(request["known"] for request in last["requests"].values())
    each = (WIDTH - CODE - 44) / longest
    now = {item["id"]: item["start"] + item["tokens"] for item in state.get("schedule", {"items": []})["items"]}
    for number, request in enumerate(recording["requests"]):
        y = LINE * number + 8
        yield f'<g class="request-{number % 7}"><rect class="own" x="{CODE}" y="{y}" width="22" height="13" rx="3"/>'
        yield f'<text class="name" x="{CODE + 11}" y="{y + 11}">{escape(request["id"][:3])}</text>'
        served = state["requests"].get(request["id"])
        if served is not None:
            known, computed = served["known"], served["computed"]
            ends = {"own": computed, "now": max(computed, now.get(request["id"], 0))}
            ends["ahead"] = max(known, ends["now"])
            begin = 0
            for look, end in ends.items():
                if end > begin:
                    x, width = CODE + 30 + begin * each, (end - begin) * each
                    yield f'<rect class="{look}" x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="11"/>'
                begin = end
        yield "</g>"


def _blocks(recording: Mapping[str, Any], event: int, top: int) -> tuple[list[str], int]:
    """The blocks of the KV cache in their owners' colours, and where they end."""
    pool = state_after(recording, event)["pool"]
    numbers = {request["id"]: number for number, request in enumerate(recording["requests"])}
    wide = (WIDTH - CODE - 10) // SQUARE
    found = []
    for block in range(pool["num_blocks"]):
        owners = pool["blocks"].get(str(block), [[]])[0]
        x, y = CODE + block % wide * SQUARE, top + block // wide * SQUARE
        look = f"own request-{numbers[owners[0]] % 7}" if owners else "ahead"
        found.append(f'<rect class="{look}" x="{x}" y="{y}" width="{SQUARE - 3}" height="{SQUARE - 3}"/>')
    return found, top + -(-pool["num_blocks"] // wide) * SQUARE
