"""The recorder, the trace, and both files that are written from it, on real engines with a clock that counts."""

import base64
import hashlib
import itertools
import json
import re
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.config import EngineConfig
from shared.engine.record import StepRecord
from shared.errors import ConfigError, RequestError
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.chrome import chrome_text, chrome_trace
from shared.tracing.lanes import LANES
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page, totals_rows
from shared.tracing.trace import CellKind, Outcome, Totals, Trace, TracedRequest, TracedStep
from shared.tracing.workload import (
    MAX_STEPS,
    Arrival,
    arrival_steps,
    mixed_requests,
    read_prompts,
    run,
    text_requests,
)

Q, P, D, S, F = CellKind.QUEUE, CellKind.PREFILL, CellKind.DECODE, CellKind.STALL, CellKind.FAILED
X, R = CellKind.PREEMPTED, CellKind.RECOMPUTE
POISON = 400


class Clock:
    """Goes on by 10 ns whenever it is read, from a start that means nothing."""

    def __init__(self) -> None:
        self.now_ns = 7_000_000

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


def make_engine(folder: Path, phase: str = "05", **settings: Any) -> Any:
    config = EngineConfig(model=str(folder), max_seq_len=128, seed=0, **settings)
    return find_lesson(phase).engine(config)


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["llama"]


def arrivals(*lengths: int, steps: tuple[int, ...] = ()) -> list[Arrival]:
    """Requests a, b, c …, whose answers have these lengths, before these steps (by default all before the first)."""
    return [
        Arrival(
            steps[n] if steps else 0,
            "abcdefgh"[n],
            tuple(range(10 * n, 10 * n + n + 2)),
            SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True),
        )
        for n, length in enumerate(lengths)
    ]


def recorded(engine: Any, workload: list[Arrival]) -> Trace:
    recorder = Recorder(engine, clock=Clock())
    run(recorder, workload)
    return recorder.trace("here", model="tiny")


def kinds(trace: Trace) -> dict[str, list[CellKind]]:
    return {request.request_id: [cell.kind for cell in trace.cells(request)] for request in trace.requests}


@pytest.mark.parametrize("phase", ["04", "05"])
def test_static_batching_by_hand(folder: Path, phase: str) -> None:
    """Two places, answers of 3, 1 and 2 tokens: c waits for the longest of the first two."""
    trace = recorded(make_engine(folder, phase, max_batch_size=2, batching_mode="static"), arrivals(3, 1, 2))
    assert kinds(trace) == {"a": [P, D, D], "b": [P], "c": [Q, Q, Q, P, D]}
    assert trace.runs(trace.requests[2]) == [(Q, 0, 3), (P, 3, 4), (D, 4, 5)]
    assert [cell.num_tokens for cell in trace.cells(trace.requests[2])] == [0, 0, 0, 4, 1]
    assert trace.totals.num_steps == 5
    assert trace.totals.slot_utilisation == (2 + 1 + 1 + 1 + 1) / (5 * 2)
    assert trace.totals.mean_queue_steps == (0 + 0 + 3) / 3
    assert trace.totals.longest_queue_steps == 3
    assert trace.totals.num_tokens == 6


def test_continuous_batching_by_hand(folder: Path) -> None:
    """The same requests: c has b's place in the next step, and no place is empty."""
    trace = recorded(make_engine(folder, max_batch_size=2), arrivals(3, 1, 2))
    assert kinds(trace) == {"a": [P, D, D], "b": [P], "c": [Q, P, D]}
    assert trace.totals.num_steps == 3
    assert trace.totals.slot_utilisation == 1.0
    assert trace.totals.mean_queue_steps == 1 / 3
    assert {lane.name: [lane.value(step) for step in trace.steps] for lane in LANES} == {
        "served": [2, 2, 2],
        "running": [1, 2, 0],
        "waiting": [1, 0, 0],
        "KV tokens": [2, 3 + 4, 0],
        "KV blocks": [1, 2, 0],
    }
    assert [lane.capacity(trace) for lane in LANES] == [2, 2, None, 2 * 128, 2]


def test_whoever_decodes_stalls_beside_prompts_under_prefill_first(folder: Path) -> None:
    engine = make_engine(folder, max_batch_size=4, scheduler_policy="prefill_first", max_decode_interval=3)
    trace = recorded(engine, arrivals(4, 2, 2, 2, steps=(0, 1, 2, 3)))
    assert kinds(trace)["a"] == [P, S, S, D, D, D]
    assert kinds(trace)["b"][0] is P
    assert [kind for kind in kinds(trace)["b"] if kind is not S] == [P, D]


@pytest.mark.parametrize(
    "settings", [{"batching_mode": "static"}, {}, {"scheduler_policy": "decode_round_robin"}], ids=str
)
def test_cells_are_what_the_engine_answered(folder: Path, settings: dict[str, str]) -> None:
    """Every token stands in a cell that computed it, every cell that computed gave one, and alone it is the same."""
    engine = make_engine(folder, max_batch_size=3, **settings)
    requests = mixed_requests(9, vocab_size=256, max_seq_len=128, max_new_tokens=12, seed=3)
    steps = arrival_steps(9, rate=0.7, seed=3)
    workload = [Arrival(step, f"r{n}", *request) for n, (step, request) in enumerate(zip(steps, requests, strict=True))]
    trace = recorded(engine, workload)
    assert len(trace.requests) == 9
    for request, arrival in zip(trace.requests, workload, strict=True):
        cells = trace.cells(request)
        assert [cell.step for cell in cells] == list(range(request.arrival_step, request.end_step or 0))
        assert [token.step for token in request.tokens] == [cell.step for cell in cells if cell.kind in (P, D)]
        assert [cell.num_tokens for cell in cells if cell.kind is P] == [len(arrival.prompt_ids)]
        alone = list(engine.generate(arrival.prompt_ids, arrival.params))
        assert [(token.token_id, token.text) for token in request.tokens] == [(o.token_id, o.text) for o in alone]
        assert (request.outcome, request.finish_reason, request.arrival_step) == ("finished", "length", arrival.step)
    computed = sum(len(step.record.prefilled) + len(step.record.decoded) for step in trace.steps)
    assert computed == sum(len(request.tokens) for request in trace.requests)


def test_a_seed_gives_the_same_trace_but_for_the_clock(folder: Path) -> None:
    def once(seed: int, clock: Any) -> Trace:
        requests = mixed_requests(6, vocab_size=256, max_seq_len=128, max_new_tokens=8, seed=seed)
        recorder = Recorder(make_engine(folder, max_batch_size=2), clock=clock)
        run(recorder, [Arrival(n // 2, str(n), *request) for n, request in enumerate(requests)])
        return recorder.trace("here")

    def timeless(trace: Trace) -> Trace:
        steps = tuple(replace(step, started_ns=0, ended_ns=0) for step in trace.steps)
        requests = tuple(replace(request, arrived_ns=0, ended_ns=0) for request in trace.requests)
        return replace(trace, steps=steps, requests=requests)

    slow = itertools.count(0, 1_000_003).__next__
    assert timeless(once(1, Clock())) == timeless(once(1, slow))
    assert once(1, Clock()) == once(1, Clock())
    assert timeless(once(1, Clock())) != timeless(once(2, Clock()))


def test_times_are_those_of_the_clock_from_the_beginning(folder: Path) -> None:
    """The clock is read at the beginning (0), once a request, and before and after each step, 10 ns apart."""
    trace = recorded(make_engine(folder, max_batch_size=1), arrivals(1, 2))
    assert [request.arrived_ns for request in trace.requests] == [10, 20]
    assert [(step.started_ns, step.ended_ns) for step in trace.steps] == [(30, 40), (50, 60), (70, 80)]
    assert [request.ended_ns for request in trace.requests] == [40, 80]
    assert trace.totals.seconds == pytest.approx(30e-9)
    assert trace.totals.mean_queue_seconds == pytest.approx(((30 - 10) + (50 - 20)) / 2 * 1e-9)
    assert trace.totals.tokens_per_second == pytest.approx(3 / 30e-9)


def test_steps_without_work_pass_time_and_count_for_nothing(folder: Path) -> None:
    trace = recorded(make_engine(folder, max_batch_size=1), arrivals(2, 1, steps=(0, 5)))
    assert kinds(trace) == {"a": [P, D], "b": [P]}
    assert [step.has_work for step in trace.steps] == [True, True, False, False, False, True]
    assert (trace.totals.num_steps, trace.totals.slot_utilisation) == (3, 1.0)


def test_steps_count_from_the_beginning_of_the_recording(folder: Path) -> None:
    engine = make_engine(folder)
    list(engine.generate([1, 2], SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)))
    trace = recorded(engine, arrivals(2))
    assert [step.record.step for step in trace.steps] == [0, 1]
    engine.add_request([1], SamplingParams())
    with pytest.raises(ValueError, match="has requests already"):
        Recorder(engine)


def test_a_request_that_fails_and_those_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, max_batch_size=3)
    forward = engine.model.forward

    def failing(tokens: Any, kv: Any) -> Any:
        if POISON in tokens.ids.tolist():
            raise RuntimeError("injected")
        return forward(tokens, kv)

    monkeypatch.setattr(engine.model, "forward", failing)
    workload = arrivals(2, 2, 2)
    workload[1] = replace(workload[1], prompt_ids=(POISON,))
    trace = recorded(engine, workload)
    assert kinds(trace) == {"a": [P, D], "b": [F], "c": [P, D]}
    failed = trace.requests[1]
    assert (failed.outcome, failed.finish_reason, failed.tokens, failed.end_step) == (Outcome.FAILED, "error", (), 1)
    assert failed.error is not None
    assert trace.totals.slot_utilisation == (3 + 2) / (2 * 3)
    (event,) = [
        event for event in chrome_trace([trace])["traceEvents"] if event["name"] == "failed" and event["ph"] == "X"
    ]
    assert event["args"]["error"] == failed.error


def test_requests_that_are_aborted_waiting_and_running(folder: Path) -> None:
    recorder = Recorder(make_engine(folder, max_batch_size=1), clock=Clock())
    for arrival in arrivals(9, 9):
        recorder.add_request(arrival.prompt_ids, arrival.params, arrival.request_id)
    recorder.step()
    recorder.step()
    assert recorder.abort("b")
    recorder.step()
    assert recorder.abort("a")
    assert not recorder.abort("a")
    trace = recorder.trace("here")
    assert kinds(trace) == {"a": [P, D, D], "b": [Q, Q]}
    assert [(r.outcome, r.finish_reason, r.end_step) for r in trace.requests] == [
        ("aborted", None, 3),
        ("aborted", None, 2),
    ]
    assert trace.totals.mean_queue_steps == 0, "b was never run"
    ends = [(event["tid"], event["ts"]) for event in chrome_trace([trace])["traceEvents"] if event["name"] == "aborted"]
    assert ends == [(n, request.ended_ns / 1000) for n, request in enumerate(trace.requests, start=1)]


def test_a_recording_that_ends_before_its_requests(folder: Path) -> None:
    recorder = Recorder(make_engine(folder, max_batch_size=1), clock=Clock())
    for arrival in arrivals(9, 9):
        recorder.add_request(arrival.prompt_ids, arrival.params, arrival.request_id)
    nothing = recorder.trace("nothing yet")
    assert nothing.totals == Totals(0, 0.0, 0, 0.0, None, None, None)
    assert [values for name, values in totals_rows([nothing]) if name == "mean queue wait"] == [["none ran"]]
    recorder.step()
    trace = recorder.trace("here")
    assert kinds(trace) == {"a": [P], "b": [Q]}
    assert {request.outcome for request in trace.requests} == {Outcome.OPEN}
    for each in (nothing, trace):
        check_events(chrome_trace([each])["traceEvents"])
        assert embedded(page([each], "x"))["traces"][0]["title"] == each.title


def test_an_id_that_is_used_again_is_another_request(folder: Path) -> None:
    recorder = Recorder(make_engine(folder), clock=Clock())
    for length in (2, 1):
        (arrival,) = arrivals(length)
        run(recorder, [replace(arrival, step=len(recorder.steps))])
    trace = recorder.trace("here")
    first, second = trace.requests
    assert [[cell.kind for cell in trace.cells(request)] for request in (first, second)] == [[P, D], [P]]
    assert [len(request.tokens) for request in (first, second)] == [2, 1]
    assert (first.end_step, second.arrival_step) == (2, 2)
    assert trace.totals.mean_queue_steps == 0


# Few blocks: who is preempted, and whose the memory is.


@pytest.fixture(scope="module")
def crowded(folder: Path) -> Trace:
    """8 blocks of 4 tokens; a (10 tokens and 15 of answer) and b (10 and 10) cannot both come to their ends."""
    engine = find_lesson("06").engine(
        EngineConfig(model=str(folder), max_seq_len=32, seed=0, block_size=4, num_gpu_blocks=8, max_batch_size=2)
    )
    params = [SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True) for count in (15, 10)]
    return recorded(engine, [Arrival(0, "ab"[n], tuple(range(1, 11)), params[n]) for n in (0, 1)])


def test_a_preemption_in_the_cells_and_totals(crowded: Trace) -> None:
    """After 16 tokens each all blocks are full: b goes in step 7, and comes again when a has ended."""
    a, b = crowded.requests
    assert kinds(crowded) == {"a": [P] + [D] * 14, "b": [P] + [D] * 6 + [X] * 8 + [R] + [D] * 2}
    assert [crowded.preemptions(request) for request in (a, b)] == [[], [7]]
    assert [(c.kind, c.num_tokens) for c in crowded.cells(b)][15] == (R, 10 + 7)
    totals = crowded.totals
    assert (totals.num_preemptions, totals.num_recomputed_tokens) == (1, 17)
    assert totals.mean_queue_steps == 0, "the wait after a preemption is none in the queue"
    assert [cell.step for cell in crowded.cells(b) if cell.kind in (P, D, R)] == [token.step for token in b.tokens]
    rows = dict(totals_rows([crowded]))
    assert (rows["preemptions"], rows["tokens computed again"]) == (["1"], ["17"])
    html = page([crowded], "x")
    assert table(html, "Requests, here")[1] == ["b", "10", "10", "0", "0", "1", "8", "0", "8", "1", "finished (length)"]
    assert table(html, "Steps, here")[7][2] == "b"


def test_a_preemption_in_the_chrome_trace(crowded: Trace) -> None:
    events = chrome_trace([crowded])["traceEvents"]
    check_events(events)
    (event,) = [event for event in events if event["name"] == "preempted"]
    assert (event["ph"], event["tid"], event["ts"]) == ("i", 2, crowded.steps[7].started_ns / 1000)
    assert [(e["tid"], e["args"]["tokens"]) for e in events if e["name"] == "recompute"] == [(2, 17)]
    blocks = [event["args"]["KV blocks"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"]
    assert blocks == [step.memory.num_held for step in crowded.steps if step.memory is not None]
    assert max(blocks) == 8


def test_the_page_can_give_back_the_memory_after_any_step(crowded: Trace) -> None:
    (data,) = embedded(page([crowded], "x"))["traces"]
    memory = data["memory"]
    assert (memory["unit"], memory["block_tokens"], memory["num_blocks"]) == ("block", 4, 8)
    for index, step in enumerate(crowded.steps):
        assert step.memory is not None
        for request, told in zip(data["requests"], memory["holdings"], strict=True):
            holding = step.memory.of_request(request["request_id"])
            blocks = [block for block, first, after in told["blocks"] if first <= index < after]
            assert blocks == ([] if holding is None else list(holding.blocks))
            if holding is not None:
                assert told["written"][index - request["arrival_step"]] == holding.num_written
    assert [request["preemptions"] for request in data["requests"]] == [[], [7]]


def test_a_slot_is_held_from_the_first_token_to_the_last(traces: list[Trace]) -> None:
    memory = embedded(page(traces[:1], "x"))["traces"][0]["memory"]
    assert (memory["unit"], memory["block_tokens"], memory["num_blocks"]) == ("slot", 128, 2)
    assert [told["blocks"] for told in memory["holdings"]] == [[[0, 0, 2]], [], [[0, 3, 6]], [[0, 9, 10]]]
    assert memory["holdings"][0]["written"] == [2, 3, 0]


def test_a_request_preempted_before_its_prompt_was_run_is_not_recomputed() -> None:
    records = [
        StepRecord(0, (), (), (), (), 0, 1, 0, 64),
        StepRecord(1, (), (), (), (), 1, 0, 0, 64, preempted=("a",)),
        StepRecord(2, (("a", 3),), (), ("a",), (), 0, 0, 3, 64),
    ]
    steps = tuple(TracedStep(record, 10 * n, 10 * n + 9) for n, record in enumerate(records))
    request = TracedRequest("a", 3, 1, 0, 0, end_step=3, ended_ns=29, outcome=Outcome.FINISHED)
    trace = Trace("x", 1, steps, (request,))
    assert kinds(trace) == {"a": [Q, X, P]}
    assert trace.totals.num_recomputed_tokens == 0
    assert embedded(page([trace], "x"))["traces"][0]["memory"] is None, "no map was made of these steps"


# The Chrome trace.


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


@pytest.fixture(scope="module")
def traces(folder: Path) -> list[Trace]:
    """The same requests under two schedulers; one prompt is text that would like to be markup."""
    both = []
    for title in ("static", "continuous"):
        recorder = Recorder(make_engine(folder, max_batch_size=2, batching_mode=title), clock=Clock())
        workload = arrivals(3, 1, 4, 2, steps=(0, 0, 1, 9))
        workload[1] = replace(workload[1], text="</script><!-- {{title}} & <b>x</b>")
        run(recorder, workload)
        both.append(recorder.trace(title, **{"batching mode": title, "seed": 0}))
    return both


def test_the_chrome_trace_is_well_formed(traces: list[Trace]) -> None:
    whole = json.loads(chrome_text(traces))
    assert whole == json.loads(json.dumps(chrome_trace(traces))), "an event a line, and nothing lost"
    assert whole["displayTimeUnit"] == "ms"
    assert whole["otherData"]["static"] == {"batching mode": "static", "seed": 0}
    check_events(whole["traceEvents"])


def test_the_chrome_trace_names_processes_and_threads(traces: list[Trace]) -> None:
    named = [event for event in chrome_trace(traces)["traceEvents"] if event["ph"] == "M"]
    processes = [(event["pid"], event["args"]["name"]) for event in named if event["name"] == "process_name"]
    assert processes == [(1, "static"), (2, "continuous")]
    threads = [(event["tid"], event["args"]["name"]) for event in named if event["name"] == "thread_name"]
    assert threads == 2 * [(0, "steps"), *((n, f"request {'abcd'[n - 1]}") for n in range(1, 5))]


def test_the_chrome_trace_holds_every_step_cell_and_counter(traces: list[Trace]) -> None:
    events = chrome_trace(traces)["traceEvents"]
    for pid, trace in enumerate(traces, start=1):
        mine = [event for event in events if event["pid"] == pid]
        spans = [event for event in mine if event["ph"] == "X"]
        steps = [event for event in spans if event["tid"] == 0]
        assert [(e["ts"] * 1000, e["dur"] * 1000) for e in steps] == [
            (pytest.approx(step.started_ns), pytest.approx(step.ended_ns - step.started_ns)) for step in trace.steps
        ]
        assert [event["args"]["decoded"] for event in steps] == [step.record.decoded for step in trace.steps]
        for tid, request in enumerate(trace.requests, start=1):
            queue, *served = [event for event in spans if event["tid"] == tid]
            cells = [cell for cell in trace.cells(request) if cell.kind in (P, D)]
            assert [(e["name"], e["args"]["step"]) for e in served] == [(cell.kind.value, cell.step) for cell in cells]
            assert [event["args"]["token id"] for event in served] == [token.token_id for token in request.tokens]
            assert [event["ts"] for event in served] == [trace.steps[cell.step].started_ns / 1000 for cell in cells]
            assert queue["name"] == "queue"
            assert queue["ts"] == request.arrived_ns / 1000
            assert queue["ts"] + queue["dur"] == pytest.approx(served[0]["ts"])
        for lane in LANES:
            counters = [event for event in mine if event["ph"] == "C" and event["name"] == lane.name]
            assert [event["args"] for event in counters] == [{lane.name: lane.value(step)} for step in trace.steps]
    assert {event["name"] for event in events if event["ph"] == "C"} == {lane.name for lane in LANES}


@dataclass(frozen=True)
class BlockRecord(StepRecord):
    """A record as a later phase could extend it: who owns which block."""

    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()


def test_what_a_record_gains_later_is_in_both_files() -> None:
    record = BlockRecord(0, (("a", 3),), (), ("a",), (), 0, 0, 3, 64, blocks=(("a", (7, 2)),))
    request = TracedRequest("a", 3, 1, 0, 0, end_step=1, ended_ns=9, outcome=Outcome.FINISHED)
    trace = Trace("blocks", 1, (TracedStep(record, 1, 9),), (request,))
    step = next(event for event in chrome_trace([trace])["traceEvents"] if event["ph"] == "X" and event["tid"] == 0)
    assert step["args"]["blocks"] == (("a", (7, 2)),)
    assert embedded(page([trace], "x"))["traces"][0]["steps"][0]["blocks"] == [["a", [7, 2]]]


# The page.


def embedded(html: str) -> Any:
    """What the script reads."""
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)
    return json.loads(data)


def table(html: str, caption: str) -> list[list[str]]:
    """The rows of the table with this caption, without its head."""
    (body,) = re.findall(rf"<caption>{caption}</caption>.*?<tbody>(.*?)</tbody>", html, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_the_page_carries_the_trace(traces: list[Trace]) -> None:
    drawn = embedded(page(traces, "two traces"))["traces"]
    for trace, data in zip(traces, drawn, strict=True):
        assert data["title"] == trace.title
        assert [tuple(step["decoded"]) for step in data["steps"]] == [step.record.decoded for step in trace.steps]
        assert [step["ended_ns"] for step in data["steps"]] == [step.ended_ns for step in trace.steps]
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


def test_the_page_needs_nobody_and_its_policy_says_so(traces: list[Trace]) -> None:
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
    static, continuous = traces
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
    assert steps[0][2:] == ["–", "a (2) b (3)", "–", "b", "2", "1", "0", "2", "1"]
    assert steps[3][2:7] == ["–", "c (4)", "–", "–", "1"]
    totals = {row[0]: row[1:] for row in table(html, "Totals")}
    assert totals["steps"] == ["9", "7"]
    assert totals["slot utilisation"] == [f"{10 / 18:.1%}", f"{10 / 14:.1%}"]
    assert totals["mean queue wait"] == ["0.5 steps", "0.0 steps"]
    assert totals["longest queue wait"] == ["2 steps", "0 steps"]
    assert totals["generated tokens"] == ["10", "10"]
    assert [row for row in totals_rows([continuous]) if row[0] == "steps"] == [("steps", ["7"])]


# The workload.


@given(number=st.integers(1, 60), every=st.integers(0, 20), seed=st.integers(0, 2**64 - 1))
def test_arrivals_at_even_steps(number: int, every: int, seed: int) -> None:
    assert arrival_steps(number, every=every, seed=seed) == [every * n for n in range(number)]


@given(number=st.integers(1, 60), rate=st.floats(0.2, 50), seed=st.integers(0, 2**64 - 1))
def test_poisson_arrivals_never_go_back_and_follow_the_seed(number: int, rate: float, seed: int) -> None:
    steps = arrival_steps(number, rate=rate, seed=seed)
    assert steps[0] == 0
    assert len(steps) == number
    assert steps == sorted(steps) == arrival_steps(number, rate=rate, seed=seed)


def test_poisson_arrivals_come_at_their_rate() -> None:
    """The moment of the last of 2001 is a sum of 2000 exponential gaps: at rate 2, 1000 steps, give or take 22."""
    ends = [arrival_steps(2001, rate=2.0, seed=seed)[-1] for seed in range(20)]
    assert sum(ends) / 20 == pytest.approx(1000, abs=5 * 22 / 20**0.5)
    assert len(set(ends)) > 10


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"every": -1}, "are -1; they must be at least 0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": -2.0}, "rate is -2.0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"rate": 1e-9}, f"a timeline has room for {MAX_STEPS} steps"),
        ({"every": 10**9}, "before step 3000000000"),
    ],
)
def test_arrivals_that_make_no_sense(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        arrival_steps(4, **settings)


@given(
    number=st.integers(1, 40),
    max_seq_len=st.integers(2, 200),
    max_new_tokens=st.integers(1, 100),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_mixed_workload_stays_in_its_bounds(number: int, max_seq_len: int, max_new_tokens: int, seed: int) -> None:
    sizes = {"vocab_size": 99, "max_seq_len": max_seq_len, "max_new_tokens": max_new_tokens}
    requests = mixed_requests(number, **sizes, seed=seed)
    assert requests == mixed_requests(number, **sizes, seed=seed)
    for ids, params in requests:
        assert min(8, max_seq_len // 2) <= len(ids) <= min(64, max_seq_len // 2)
        assert set(ids) <= set(range(99))
        assert max(1, max_new_tokens // 8) <= params.max_new_tokens <= max_new_tokens
        assert (params.temperature, params.ignore_eos) == (0.0, True)


def test_answers_longer_than_a_timeline_are_refused_before_any_step(folder: Path) -> None:
    recorder = Recorder(make_engine(folder, max_batch_size=2))
    workload = arrivals(5)
    workload[0] = replace(workload[0], params=SamplingParams(max_new_tokens=2 * MAX_STEPS + 2))
    with pytest.raises(ConfigError, match=f"at least {MAX_STEPS + 1} steps with 2 at a time"):
        run(recorder, workload)
    assert recorder.steps == []


def test_prompts_are_the_lines_that_are_not_blank(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("eins\r\n\n  \nzwei: ä\n".encode())
    assert read_prompts(path) == [(1, "eins"), (4, "zwei: ä")]
    tokenizer = make_engine(folder).tokenizer
    sizes = {"tokenizer": tokenizer, "vocab_size": 512, "max_new_tokens": 5}
    requests = text_requests(read_prompts(path), max_seq_len=64, **sizes)
    assert [tokenizer.decode(list(ids)) for ids, _ in requests] == ["eins", "zwei: ä"]
    assert {(params.temperature, params.max_new_tokens, params.ignore_eos) for _, params in requests} == {
        (0.0, 5, False)
    }
    with pytest.raises(RequestError, match=r"^Line 4: The prompt has \d+ tokens and a sequence may have 6"):
        text_requests(read_prompts(path), max_seq_len=6, **sizes)
