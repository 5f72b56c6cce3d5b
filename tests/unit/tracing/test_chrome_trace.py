"""The Chrome trace: well formed, with every step, cell and counter."""

import json

import pytest

from shared.tracing.chrome import chrome_text, chrome_trace
from shared.tracing.lanes import LANES
from shared.tracing.trace import Trace
from tests.unit.tracing.recording import D, P
from tests.unit.tracing.written import check_events


def test_the_chrome_trace_is_well_formed_and_names_processes_and_threads(traces: list[Trace]) -> None:
    whole = json.loads(chrome_text(traces))
    assert whole == json.loads(json.dumps(chrome_trace(traces))), "an event a line, and nothing lost"
    assert whole["displayTimeUnit"] == "ms"
    assert whole["otherData"]["static"] == {"batching mode": "static", "seed": 0}
    check_events(whole["traceEvents"])
    named = [event for event in whole["traceEvents"] if event["ph"] == "M"]
    processes = [(event["pid"], event["args"]["name"]) for event in named if event["name"] == "process_name"]
    assert processes == [(1, "static"), (2, "continuous")]
    threads = [(event["tid"], event["args"]["name"]) for event in named if event["name"] == "thread_name"]
    assert threads == 2 * [(0, "steps"), (1, "host"), *((n, f"request {'abcd'[n - 2]}") for n in range(2, 6))]


def test_the_chrome_trace_holds_every_step_cell_and_counter(traces: list[Trace]) -> None:
    events = chrome_trace(traces)["traceEvents"]
    for pid, trace in enumerate(traces, start=1):
        spans = [event for event in events if (event["pid"], event["ph"]) == (pid, "X")]
        steps = [(e["ts"] * 1000, e["dur"] * 1000, e["args"]["decoded"]) for e in spans if e["tid"] == 0]
        assert steps == [
            (pytest.approx(step.started_ns), pytest.approx(step.ended_ns - step.started_ns), step.record.decoded)
            for step in trace.steps
        ]
        for tid, request in enumerate(trace.requests, start=2):
            queue, *served = [event for event in spans if event["tid"] == tid]
            cells = [cell for cell in trace.cells(request) if cell.kind in (P, D)]
            assert [(e["name"], e["args"]["step"], e["ts"], e["args"]["token id"]) for e in served] == [
                (cell.kind.value, cell.step, trace.steps[cell.step].started_ns / 1000, token.token_id)
                for cell, token in zip(cells, request.tokens, strict=True)
            ]
            assert (queue["name"], queue["ts"]) == ("queue", request.arrived_ns / 1000)
            assert queue["ts"] + queue["dur"] == pytest.approx(served[0]["ts"])
        counters = [(e["name"], e["args"]) for e in events if (e["pid"], e["ph"]) == (pid, "C")]
        for lane in LANES:
            told = [values for name, values in counters if name == lane.name]
            assert told == [{lane.name: lane.value(step)} for step in trace.steps]
        assert {name for name, _ in counters} == {lane.name for lane in LANES}
