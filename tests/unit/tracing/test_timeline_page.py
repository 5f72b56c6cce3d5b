"""The timeline page: it contains the trace, escapes foreign text and loads nothing; its tables."""

import base64
import hashlib
import re

from shared.tracing.lanes import LANES
from shared.tracing.timeline_page import page
from shared.tracing.trace import CellKind, Trace
from tests.unit.tracing.written import embedded, table


def test_the_page_carries_the_trace(traces: list[Trace]) -> None:
    drawn = embedded(page(traces, "two traces"))["traces"]
    for trace, data in zip(traces, drawn, strict=True):
        assert data["title"] == trace.title
        assert [(tuple(step["decoded"]), step["ended_ns"]) for step in data["steps"]] == [
            (step.record.decoded, step.ended_ns) for step in trace.steps
        ]
        for request, values in zip(trace.requests, data["requests"], strict=True):
            assert [(CellKind(kind), first, after) for kind, first, after in values["runs"]] == trace.runs(request)
            assert [token[:2] for token in values["tokens"]] == [[t.step, t.token_id] for t in request.tokens]
            assert values["prompt"] == request.prompt
        assert [lane["values"] for lane in data["lanes"]] == [[lane.value(s) for s in trace.steps] for lane in LANES]


def test_what_users_and_models_wrote_is_no_markup(traces: list[Trace]) -> None:
    html = page(traces, "<i>{{data}}</i>")
    assert "<b>x" not in html
    assert "<!--" not in html.replace("<!doctype", "")
    assert html.count("</script>") == 2
    assert "<title>&lt;i&gt;{{data}}&lt;/i&gt;</title>" in html


def test_the_page_loads_nothing_and_its_policy_forbids_it(traces: list[Trace]) -> None:
    html = page(traces, "x")
    assert set(re.findall(r"https?://[^\s'\"<>]+", html)) == {"http://www.w3.org/2000/svg"}, "a name, never fetched"
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert "default-src 'none'" in policy
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_the_tables_hold_what_the_timeline_shows(traces: list[Trace]) -> None:
    html = page(traces, "x")
    static, _ = traces
    # Two places; b ends at once, a after step 2; static then lets c in, and d comes into the empty engine.
    assert table(html, "Requests, static") == [
        ["a", "2", "3", "0", "0", "1", "2", "0", "0", "0", "finished (length)"],
        ["b", "3", "1", "0", "0", "1", "0", "0", "0", "0", "finished (length)"],
        ["c", "4", "4", "1", "2", "1", "3", "0", "0", "0", "finished (length)"],
        ["d", "5", "2", "9", "0", "1", "1", "0", "0", "0", "finished (length)"],
    ]
    row = ["c", "4", "4", "1", "0", "1", "3", "0", "0", "0", "finished (length)"]
    assert table(html, "Requests, continuous")[2] == row
    steps = table(html, "Steps, static")
    assert len(steps) == len(static.steps)
    assert steps[0][0] == "0"
    assert steps[0][2:-1] == ["–", "a (2) b (3)", "–", "b", "2", "1", "0", "2", "1"]
    assert steps[3][2:7] == ["–", "c (4)", "–", "–", "1"]
    totals = {row[0]: row[1:] for row in table(html, "Totals")}
    assert totals["steps"] == ["9", "7"]
    assert totals["batch utilisation"] == [f"{10 / 18:.1%}", f"{10 / 14:.1%}"]
    assert totals["mean queue wait"] == ["0.5 steps", "0.0 steps"]
    assert totals["longest queue wait"] == ["2 steps", "0 steps"]
    assert totals["generated tokens"] == ["10", "10"]
