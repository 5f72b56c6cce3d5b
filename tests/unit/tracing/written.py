"""What is read back from the Chrome trace and from the page."""

import itertools
import json
import re
from html import unescape
from typing import Any


def check_events(events: list[dict[str, Any]]) -> None:
    """What the Trace Event Format asks of each kind of event, and that no two spans of a thread overlap."""
    needed = {"M": {"name", "args"}, "X": {"name", "cat", "ts", "dur", "tid"}, "C": {"name", "ts", "args"}}
    needed["i"] = {"name", "ts", "tid", "s"}
    for event in events:
        assert {"ph", "pid"} | needed[event["ph"]] <= set(event)
        assert isinstance(event["pid"], int)
        assert all(event[key] >= 0 for key in ("ts", "dur") if key in event)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    spans: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread in spans.values():
        for before, after in itertools.pairwise(sorted(thread, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9


def embedded(html: str) -> Any:
    """What the script reads."""
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def table(html: str, caption: str) -> list[list[str]]:
    """The rows of the table with this caption, without its head."""
    (body,) = re.findall(rf"<caption>{caption}</caption>.*?<tbody>(.*?)</tbody>", html, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]
