"""The recorder and the trace: cells, totals and times by hand, failures, aborts, ids that are used again."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.sampling.params import SamplingParams
from shared.tracing.chrome import chrome_trace
from shared.tracing.lanes import LANES
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page, totals_rows
from shared.tracing.trace import Outcome, Totals
from shared.tracing.workload import Arrival, arrival_steps, mixed_requests, run
from tests.random_loads import raise_for
from tests.unit.tracing.recording import POISON, Clock, D, F, P, Q, arrivals, kinds, make_engine, recorded
from tests.unit.tracing.written import check_events, embedded


def added(recorder: Recorder) -> Recorder:
    """Two requests with long answers are in the queue."""
    for arrival in arrivals(9, 9):
        recorder.add_request(arrival.prompt_ids, arrival.params, arrival.request_id)
    return recorder


@pytest.mark.parametrize("phase", ["04", "05"])
def test_static_batching_by_hand(folder: Path, phase: str) -> None:
    """Two rows, answers of 3, 1 and 2 tokens: c waits for the longest of the first two."""
    trace = recorded(make_engine(folder, phase, max_batch_size=2, batching_mode="static"), arrivals(3, 1, 2))
    assert kinds(trace) == {"a": [P, D, D], "b": [P], "c": [Q, Q, Q, P, D]}
    assert trace.runs(trace.requests[2]) == [(Q, 0, 3), (P, 3, 4), (D, 4, 5)]
    assert [cell.num_tokens for cell in trace.cells(trace.requests[2])] == [0, 0, 0, 4, 1]
    totals = trace.totals
    assert (totals.num_steps, totals.num_tokens, totals.batch_utilisation) == (5, 6, (2 + 1 + 1 + 1 + 1) / (5 * 2))
    assert (totals.mean_queue_steps, totals.longest_queue_steps) == ((0 + 0 + 3) / 3, 3)


def test_continuous_batching_by_hand(folder: Path) -> None:
    """The same requests: c has b's row in the next step, and no row is empty."""
    trace = recorded(make_engine(folder, max_batch_size=2), arrivals(3, 1, 2))
    assert kinds(trace) == {"a": [P, D, D], "b": [P], "c": [Q, P, D]}
    totals = trace.totals
    assert (totals.num_steps, totals.batch_utilisation, totals.mean_queue_steps) == (3, 1.0, 1 / 3)
    assert {lane.name: [lane.value(step) for step in trace.steps] for lane in LANES} == {
        "served": [2, 2, 2],
        "running": [1, 2, 0],
        "waiting": [1, 0, 0],
        "KV tokens": [2, 3 + 4, 0],
        "KV blocks": [1, 2, 0],
    }
    assert [lane.capacity(trace) for lane in LANES] == [2, 2, None, 2 * 128, 2]


@pytest.mark.parametrize(
    "settings", [{"batching_mode": "static"}, {}, {"scheduler_policy": "decode_round_robin"}], ids=str
)
def test_cells_are_what_the_engine_answered(folder: Path, settings: dict[str, str]) -> None:
    """Every token is in a cell that computed it, every cell that computed gave one, and alone it is the same."""
    engine = make_engine(folder, max_batch_size=3, **settings)
    requests = mixed_requests(9, vocab_size=256, max_seq_len=128, max_new_tokens=12, seed=3)
    steps = arrival_steps(9, rate=0.7, seed=3)
    workload = [Arrival(step, f"r{n}", *request) for n, (step, request) in enumerate(zip(steps, requests, strict=True))]
    trace = recorded(engine, workload)
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


def test_times_are_those_of_the_clock_from_the_beginning(folder: Path) -> None:
    """The clock is read at the beginning (0), once a request, and 8 times a step, 10 ns apart."""
    trace = recorded(make_engine(folder, "07", max_batch_size=1), arrivals(1, 2))
    assert [request.arrived_ns for request in trace.requests] == [10, 20]
    assert [(step.started_ns, step.ended_ns) for step in trace.steps] == [(30, 100), (110, 180), (190, 260)]
    assert [request.ended_ns for request in trace.requests] == [100, 260]
    assert trace.totals.seconds == pytest.approx(210e-9)
    assert trace.totals.mean_queue_seconds == pytest.approx(((30 - 10) + (110 - 20)) / 2 * 1e-9)
    assert trace.totals.tokens_per_second == pytest.approx(3 / 210e-9)


def test_steps_count_from_the_beginning_and_those_without_work_count_for_nothing(folder: Path) -> None:
    engine = make_engine(folder, max_batch_size=1)
    list(engine.generate([1, 2], SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)))
    trace = recorded(engine, arrivals(2, 1, steps=(0, 5)))
    assert kinds(trace) == {"a": [P, D], "b": [P]}
    assert [step.record.step for step in trace.steps] == [0, 1, 2, 3, 4, 5]
    assert [step.has_work for step in trace.steps] == [True, True, False, False, False, True]
    assert (trace.totals.num_steps, trace.totals.batch_utilisation) == (3, 1.0)
    engine.add_request([1], SamplingParams())
    with pytest.raises(ValueError, match="has requests already"):
        Recorder(engine)


@pytest.mark.failing_forwards
def test_a_request_that_fails_and_those_beside_it(folder: Path) -> None:
    engine = make_engine(folder, max_batch_size=3)
    raise_for(engine, POISON)
    workload = arrivals(2, 2, 2)
    workload[1] = replace(workload[1], prompt_ids=(POISON,))
    trace = recorded(engine, workload)
    assert kinds(trace) == {"a": [P, D], "b": [F], "c": [P, D]}
    failed = trace.requests[1]
    assert (failed.outcome, failed.finish_reason, failed.tokens, failed.end_step) == (Outcome.FAILED, "error", (), 1)
    assert trace.totals.batch_utilisation == (3 + 2) / (2 * 3)
    events = [e for e in chrome_trace([trace])["traceEvents"] if (e["name"], e["ph"]) == ("failed", "X")]
    assert [event["args"]["error"] for event in events] == [failed.error] != [None]


def test_requests_that_are_aborted_waiting_and_running(folder: Path) -> None:
    recorder = added(Recorder(make_engine(folder, max_batch_size=1), clock=Clock()))
    recorder.step()
    recorder.step()
    assert recorder.abort("b")
    recorder.step()
    assert [recorder.abort("a"), recorder.abort("a")] == [True, False]
    trace = recorder.trace("here")
    assert kinds(trace) == {"a": [P, D, D], "b": [Q, Q]}
    ends = [(r.outcome, r.finish_reason, r.end_step) for r in trace.requests]
    assert ends == [("aborted", None, 3), ("aborted", None, 2)]
    assert trace.totals.mean_queue_steps == 0, "b was never run"
    events = [(e["tid"], e["ts"]) for e in chrome_trace([trace])["traceEvents"] if e["name"] == "aborted"]
    assert events == [(n, request.ended_ns / 1000) for n, request in enumerate(trace.requests, start=2)]


def test_a_recording_that_ends_before_its_requests(folder: Path) -> None:
    recorder = added(Recorder(make_engine(folder, max_batch_size=1), clock=Clock()))
    nothing = recorder.trace("nothing yet")
    assert nothing.totals == Totals(0, 0.0, 0, 0.0, None, None, None, num_prompt_tokens=5)
    assert dict(totals_rows([nothing]))["mean queue wait"] == ["none ran"]
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
    assert [[cell.kind for cell in trace.cells(request)] for request in trace.requests] == [[P, D], [P]]
    assert [len(request.tokens) for request in trace.requests] == [2, 1]
    assert (trace.requests[0].end_step, trace.requests[1].arrival_step, trace.totals.mean_queue_steps) == (2, 2, 0)
