"""The stepper's page: it contains the recordings, loads nothing, and finds moments as the script does."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.tracing.steps.moments import code_of, find, named, state_after, text_of
from shared.tracing.steps.page import write

RECORDINGS = Path(__file__).parents[3] / "tutorial/recordings"


@pytest.fixture(scope="module")
def recording() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDINGS / "phase_07.json").read_text(encoding="utf-8"))
    return found


def test_the_page_carries_the_recordings_and_no_markup_of_theirs(recording: dict[str, Any]) -> None:
    other = recording | {"title": "</script><b>x"}
    html = write(recording | {"title": "<i>{{data}}</i>"}, other=other)
    (data,) = re.findall(r'<script id="data" type="application/gzip">(.*?)</script>', html)
    shown = json.loads(gzip.decompress(base64.b64decode(data)))["recordings"]
    assert shown == [other, recording | {"title": "<i>{{data}}</i>"}]
    assert html.count("</script>") == 2
    assert "<title>Phase 07 &lt;i&gt;{{data}}&lt;/i&gt;, line by line</title>" in html
    assert write(recording) == write(recording)


def test_the_page_loads_nothing_and_its_policy_forbids_it(recording: dict[str, Any]) -> None:
    html = write(recording)
    assert set(re.findall(r"https?://[^\s'\"<>]+", html)) == {"http://www.w3.org/2000/svg"}, "a name, never fetched"
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert "default-src 'none'" in policy
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_a_moment_is_a_function_of_that_name_or_else_a_line_with_the_text(recording: dict[str, Any]) -> None:
    first, after = (recording["steps"][step]["first"] for step in (3, 4))
    assert find(recording, 3) == first
    event = find(recording, 3, "schedule")
    assert event is not None
    assert first < event < after
    assert code_of(recording, event)[0]["name"] == "ChunkedScheduler.schedule"
    event = find(recording, 3, "entries =")
    assert event is not None
    assert "entries =" in text_of(recording, event)
    assert find(recording, 3, "no such line") is None
    assert find(recording, len(recording["steps"])) is None
    assert find(recording, -1) is None
    end = state_after(recording, len(recording["events"]) - 1)
    assert end["queues"]["finished"] == [request["id"] for request in recording["requests"]]


def test_an_address_names_an_event(recording: dict[str, Any]) -> None:
    first = recording["steps"][3]["first"]
    schedule = find(recording, 3, "schedule")
    question = {"name": "chunk", "step": 3, "line": "schedule", "ask": "?", "reveal": "!"}
    asking = recording | {"questions": [question, {"name": "whole", "step": 3, "ask": "?", "reveal": "!"}]}
    for address, event in {
        "": 0,
        "step=3": first,
        "step=3&line=schedule": schedule,
        "step=3&line=entries%20=": find(recording, 3, "entries ="),
        "step=3&event=4&follow=A": first + 4,
        "ask=chunk": schedule,
        "ask=whole": first,
        "ask=whole&line=schedule": schedule,
        "ask=chunk&event=2": first + 2,
        "ask=chunk&step=2": recording["steps"][2]["first"],
        "step=three": None,
        "step=3&event=9999": None,
        "step=3&event=x": None,
        "step=99": None,
        "ask=other": None,
    }.items():
        assert named(asking, address) == event, address
