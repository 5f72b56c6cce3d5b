"""The serving benchmark's parts: traces, how they are put to an engine, contenders, figures by hand, vLLM's adapter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.report import ratio
from benchmarks.run_matrix import add_gains, configurations
from benchmarks.serving import engine_load
from benchmarks.serving.engine_load import BatchQueue, OneAtATime, drive
from benchmarks.serving.http_load import read_event
from benchmarks.serving.results import (
    ServedRequest,
    ServedRun,
    TimedStep,
    by_turn,
    decode_stalls,
    figures,
    percentiles,
    requests_overtaken,
    tokens_recomputed,
)
from benchmarks.serving.transformers_engine import TransformersEngine
from benchmarks.workloads.serving import Trace, TraceRequest, Workload, make_trace
from phases.phase_03.engine import Engine as Plain
from shared.engine.config import EngineConfig
from shared.engine.record import StepRecord
from shared.errors import QueueFullError
from shared.lessons import lessons
from shared.server.http.sse import COMMENT, DONE, frame

MIXED = Workload("mixed", "Mixed", 40, 4, (8, 20), (3, 9))


def step(started: float, ended: float, prefilled: Any = (), **fields: Any) -> TimedStep:
    """``prefilled`` are ids, of which each has 5 tokens, or pairs of an id and its tokens; each begins at token 0."""
    entries = tuple((entry, 5) if isinstance(entry, str) else entry for entry in prefilled)
    blank = {"step": 0, "finished": (), "failed": (), "num_running": 0, "num_waiting": 0}
    blank |= {"decoded": (), "kv_used_tokens": 0, "kv_capacity_tokens": 100, "prefill_starts": (0,) * len(entries)}
    return TimedStep(started, ended, StepRecord(**(blank | fields), prefilled=entries))


def request(arrived: float, scheduled: float | None, times: list[float], error: str | None = None) -> ServedRequest:
    return ServedRequest(arrived, 5, scheduled, times, list(range(len(times))), times[-1] if times else arrived, error)


def test_a_trace_follows_from_workload_and_seed_and_reaches_its_bounds() -> None:
    assert make_trace(MIXED, 100, seed=3) == make_trace(MIXED, 100, seed=3)
    assert make_trace(MIXED, 100, seed=3) != make_trace(MIXED, 100, seed=4)
    assert make_trace(MIXED, 100, seed=3) != make_trace(replace(MIXED, name="other"), 100, seed=3)
    trace = make_trace(replace(MIXED, num_requests=400), 50, seed=0)
    assert {len(r.prompt_ids) for r in trace.requests} == set(range(8, 21))
    assert {r.new_tokens for r in trace.requests} == set(range(3, 10))
    assert {token for r in trace.requests for token in r.prompt_ids} == set(range(50))
    trace = make_trace(Workload("w3", "W3", 10, 2, (36, 40), (2, 2), shared_prefix_tokens=32), 10_000, seed=0)
    assert [len({r.prompt_ids[part] for r in trace.requests}) for part in (slice(32), slice(32, None))] == [1, 10]


def test_poisson_arrivals_are_the_same_requests_and_scale_with_the_rate() -> None:
    loop, once, fast = (make_trace(MIXED, 100, 7, rate) for rate in (None, 1.0, 8.0))
    assert (loop.concurrency, once.concurrency, loop.requests[0].arrival) == (4, None, None)
    times = [r.arrival or 0.0 for r in fast.requests]
    assert (times[0], times) == (0, sorted(times))
    assert np.allclose(times, [(r.arrival or 0.0) / 8 for r in once.requests])
    assert [replace(r, arrival=None) for r in fast.requests] == list(loop.requests)


def test_a_phase_is_a_row_of_the_matrix_and_each_alternative_another() -> None:
    rows = configurations([lesson for lesson in lessons() if lesson.generates], is_gpu=True)
    policies = ["05 scheduler_policy=prefill_first", "05 scheduler_policy=decode_round_robin"]
    names = [row.name for _, row in rows]
    assert names[3:9] == ["04", "05", *policies, "06", "06 kv_cache_backend=contiguous"]
    for lesson, row in rows:
        EngineConfig(**row.settings).check(lesson.load("engine").SUPPORTED)
        for name, value in row.settings.items():
            assert value != EngineConfig.__dataclass_fields__[name].default, "a default is no row of its own"


def test_gains_are_over_the_first_row_and_over_the_phase_before_in_its_defaults() -> None:
    speeds = {"02": 10.0, "04": 40.0, "05": 60.0, "05 x=1": 20.0}
    results: dict[str, Any] = {
        row: {"settings": row[3:]} | {w: {"output_tokens_per_second": speed} for w in ("w1", "w2", "w3")}
        for row, speed in speeds.items()
    }
    add_gains(results)
    assert [r["w1"]["gain_over_first"] for r in results.values()] == [1.0, 4.0, 6.0, 2.0]
    assert [r["w3"]["gain_over_previous"] for r in results.values()] == [None, 4.0, 1.5, 0.5]


class Clock:
    """Stands in for the module ``time``: it goes only where something sleeps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(engine_load, "time", clock := Clock())
    return clock


class Clockwork(BatchQueue):
    """An engine without a model: every step of a batch takes 50 ms of ``clock`` and gives its number."""

    def __init__(self, max_running: int, clock: Clock | None = None, max_waiting: int = 99) -> None:
        super().__init__(self._answer, max_running)
        self.clock, self.max_waiting, self.most_open = clock or Clock(), max_waiting, 0

    def _answer(self, prompts: Any, new_tokens: int) -> Any:
        for n in range(new_tokens):
            self.clock.sleep(0.05)
            yield [n] * len(prompts)

    def add_request(self, prompt: Any, params: Any, request_id: str | None = None) -> str:
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError("the queue is full")
        self.most_open = max(self.most_open, len(self.waiting) + len(self.open) + 1)
        return super().add_request(prompt, params, request_id)

    def stats(self) -> dict[str, int]:
        return {"forward passes": self.num_steps}


def test_a_closed_loop_keeps_so_many_open_and_answers_all() -> None:
    trace, engine = make_trace(MIXED, 100, seed=0), Clockwork(max_running=2)
    run: Any = drive(engine, trace)
    assert (engine.most_open, run.is_cut, run.num_tokens) == (4, False, trace.new_tokens)
    assert [r.token_ids for r in run.requests] == [list(range(r.new_tokens)) for r in trace.requests]
    assert all(r.arrived <= r.scheduled < r.token_times[0] <= r.token_times[-1] == r.ended for r in run.requests)
    assert run.num_forwards == len(run.steps) == engine.num_steps
    # After the first four, each comes in the moment in which another ended.
    ends = sorted(r.ended for r in run.requests)
    assert [r.arrived for r in run.requests] == [0.0] * 4 + ends[: len(run.requests) - 4]


def test_by_the_clock_a_request_waits_from_its_arrival_whatever_was_busy(clock: Clock) -> None:
    requests = (TraceRequest((1,), 1, 0.0), TraceRequest((1,), 1, 0.005), TraceRequest((1,), 1, 0.15))
    run: Any = drive(Clockwork(1, clock), Trace(requests, concurrency=None))
    assert [r.arrived for r in run.requests] == [0.0, 0.005, 0.15]
    assert [r.scheduled for r in run.requests] == pytest.approx([0.0, 0.05, 0.15])
    assert [r.ended for r in run.requests] == pytest.approx([0.05, 0.1, 0.2])
    assert len(run.steps) == 3, "it sleeps, and does not step, while nothing is there"


def test_a_refusal_is_an_error_that_frees_its_place_and_a_cut_leaves_nothing(clock: Clock) -> None:
    run = drive(Clockwork(max_running=1, max_waiting=2), Trace((TraceRequest((1,), 2),) * 6, concurrency=5))
    assert [r.error is None for r in run.requests] == [True, True, False, False, False, False]
    assert [len(r.token_ids) for r in run.finished] == [2, 2]
    engine = Clockwork(2, clock)
    run = drive(engine, Trace((TraceRequest((1,), 1000),) * 3, concurrency=3), max_seconds=0.48)
    assert (run.is_cut, run.finished, engine.has_work(), figures(run, 2, 4)["num_errors"]) == (True, [], False, 0)
    assert run.num_tokens == 2 * 10


def test_a_turn_of_a_conversation_begins_with_all_before_it_and_follows_at_once() -> None:
    workload = Workload("talk", "Talk", 3, 2, (6, 6), (4, 4), shared_prefix_tokens=5, turns=3, turn_tokens=(2, 3))
    trace, engine = make_trace(workload, 100, seed=0), Clockwork(max_running=2)
    assert (workload.longest, trace.new_tokens) == (6 + 4 + 2 * (3 + 4), 3 * 3 * 4)
    begun = trace.requests[0]
    second = begun.next_turn([7, 8, 9, 5])
    assert second.prompt_ids == (*begun.prompt_ids, 7, 8, 9, 5, *begun.turns[0].prompt_ids)
    assert (second.turns, second.new_tokens) == (begun.turns[1:], 4)
    run = drive(engine, trace)
    assert [r.turn for r in run.requests] == [0, 0, 0, 1, 1, 2, 2, 1, 2], "two at a time, and the third begins last"
    assert (len(run.finished), run.num_tokens, engine.most_open) == (9, trace.new_tokens, 2)
    assert by_turn(run)[0] == 6 < by_turn(run)[1] < by_turn(run)[2]


def test_the_background_decodes_until_the_others_have_ended_and_times_between_tokens_are_its_own() -> None:
    workload = Workload("long", "Long", 3, 2 + 3, (20, 20), (4, 4), beside=Workload("w", "W", 2, 2, (5, 5), (9, 9)))
    for rate in (None, 1e9):
        trace = make_trace(workload, 100, seed=0, rate=rate)
        told = [(len(r.prompt_ids), r.new_tokens, r.is_background) for r in trace.requests]
        assert told == [(5, 19, True)] * 2 + [(20, 4, False)] * 3
        engine = Clockwork(max_running=5)
        run = drive(engine, trace)
        assert ([r.ended is None for r in run.requests], engine.has_work()) == ([True] * 2 + [False] * 3, False)
        assert (run.is_cut, len(run.finished)) == (False, 3)
    times, other = [0.0, 1.0, 3.0], request(0.0, 1.0, [5.0, 9.0])
    background = ServedRequest(0.0, 5, 0.0, times, [1, 2, 3], is_background=True)
    found = figures(ServedRun([background, other], steps=None, num_forwards=None), 2, 4)
    told = [found[key]["p50"] for key in ("inter_token_latency_ms", "time_to_first_token_ms", "request_latency_ms")]
    assert told == [1500, 5000, 9000]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_transformers_gives_the_plain_loops_tokens(tiny_checkpoints: dict[str, Path], family: str) -> None:
    """In batches of three, of prompts of 3 to 40 tokens, more than Gemma's window, and answers of 1 to 9."""
    config = EngineConfig(model=str(tiny_checkpoints[family]), max_seq_len=64)
    rows = make_trace(replace(MIXED, num_requests=5, prompt_tokens=(40, 40)), 300, seed=0).requests
    lengths = [(40, 9), (3, 1), (17, 5), (8, 4), (25, 8)]
    requests = [TraceRequest(row.prompt_ids[:n], new) for row, (n, new) in zip(rows, lengths, strict=True)]
    trace, padded = Trace(tuple(requests), concurrency=5), TransformersEngine(replace(config, max_batch_size=3))
    plain, run = drive(OneAtATime(Plain(config)), trace), drive(padded, trace)
    assert [r.token_ids for r in run.requests] == [r.token_ids for r in plain.requests]
    assert plain.num_forwards == sum(new for _, new in lengths)
    # Three rows of the longest prompt and of the longest answer's decoding; then two.
    assert padded.num_tokens_computed == 3 * (40 + 8) + 2 * (25 + 7)
    assert [len(step.record.decoded) for step in run.steps or ()][1:9] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert (drive(padded, trace, max_seconds=1e-9).is_cut, padded.has_work()) == (True, False)
    again = drive(padded, trace)
    assert [r.token_ids for r in again.requests] == [r.token_ids for r in plain.requests], "the batch before is over"
    padded.model.generate = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        drive(padded, trace)


def test_the_servers_events_are_read() -> None:
    text = '{"text":"a: b\u2028\x85"}'  # in which Python sees ends of lines
    found = [read_event(data.removesuffix(b"\n\n")) for data in (frame(text.encode(), "token"), COMMENT, DONE)]
    assert found == [("token", text), ("", ""), ("", "[DONE]")]


def test_figures_by_hand() -> None:
    requests = [request(0.0, 1.0, [2.0, 3.0, 5.0]), request(1.0, 4.0, [5.0, 6.0]), request(2.0, None, [], "queue full")]
    steps = [
        step(1.0, 2.0, ["0"], kv_used_tokens=10),
        step(2.0, 3.0, decoded=("0",), kv_used_tokens=20),
        step(4.0, 5.0, ["1"], decoded=("0",), kv_used_tokens=30),
        step(5.0, 6.0, decoded=("1",), kv_used_tokens=0),
    ]
    found = figures(ServedRun(requests, steps, num_forwards=5), max_batch_size=2, max_decode_interval=4)
    expected = {"num_requests": 3, "num_finished": 2, "num_errors": 1, "output_tokens": 5, "seconds": 6.0, "steps": 4}
    expected |= {"forward_passes": 5, "slot_utilisation": 5 / 8, "saturated_kv_utilisation": 0.15, "mean_step_ms": 1000}
    expected |= {"decode_stalls": 0, "requests_overtaken": 0, "preemptions": 0}
    assert {key: found[key] for key in expected} == expected
    assert found["output_tokens_per_second"] == pytest.approx(5 / 6, rel=1e-3)
    assert found["requests_per_second"] == pytest.approx(2 / 6, rel=1e-3)
    # Waits of 1 and 3 s, first tokens after 2 and 4 s, gaps of 1, 2 and 1 s, answers after 5 and 5 s.
    keys = ("queue_wait_ms", "time_to_first_token_ms", "inter_token_latency_ms", "request_latency_ms")
    assert [found[key]["p50"] for key in keys] == [2000, 3000, 1000, 5000]
    unseen = figures(ServedRun([request(0.0, None, [1.0])], steps=None, num_forwards=None), 4, 4)
    assert unseen["queue_wait_ms"] is unseen["slot_utilisation"] is unseen["decode_stalls"] is None
    # From the last first token, at 3 s, to the first end, at 5 s: four tokens.
    both = [request(0.0, 1.0, [2.0, 4.0, 5.0]), request(0.0, 1.0, [3.0, 4.0, 5.0, 6.0])]
    found = figures(ServedRun(both, None, None), 2, 4)
    assert (found["decode_tokens_per_second"], unseen["decode_tokens_per_second"]) == (2.0, None)
    # Of 1 … 5 s the place of P95 is 0.95 · 4 = 3.8, between the fourth and the fifth.
    assert percentiles([5.0, 3.0, 1.0, 2.0, 4.0]) == {"p50": 3000.0, "p95": 4800.0, "p99": 4960.0}
    assert percentiles([]) is None
    assert (ratio(3.0, 2.0), ratio(None, 2.0), ratio(3.0, None), ratio(3.0, 0.0)) == (1.5, None, None, None)


def test_a_request_that_was_preempted_counts_from_its_first_prefill() -> None:
    """Request 1 is computed, preempted, and computed anew with the two tokens it had; 2 is preempted uncomputed."""
    steps = [
        step(0, 1, ["0", "1"], num_waiting=1, num_running=2, kv_used_tokens=10),
        step(1, 2, decoded=("0", "1"), num_waiting=1, num_running=3, kv_used_tokens=12),
        step(2, 3, decoded=("0",), preempted=("2", "1"), num_waiting=2, num_running=1, kv_used_tokens=7),
        step(3, 4, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=8),
        step(4, 5, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=9),
        step(5, 6, decoded=("0",), finished=("0",), num_waiting=2, num_running=0),
        step(6, 7, [("1", 7), "2"], num_running=2, kv_used_tokens=12),
        step(7, 8, decoded=("1", "2"), finished=("1", "2")),
    ]
    # Of the 7 tokens 5 were its prompt's and 1 its first answer's; the last it would have computed in any case.
    assert tokens_recomputed(steps) == 6
    assert decode_stalls(steps, max_decode_interval=4) == 0, "a preempted request does not decode"
    run = ServedRun([request(0.0, 0.0, [1.0])], steps, num_forwards=8)
    told = figures(run, max_batch_size=3, max_decode_interval=4)
    assert told["preemptions"] == 2
    # Of the six steps that left any waiting: those that held memory in them, those that ended in them too.
    assert told["peak_concurrent"] == 3
    assert told["mean_concurrent"] == 1.5 == (2 + 3 + 1 + 1 + 1 + 1) / 6
    assert told["saturated_kv_utilisation"] == pytest.approx((10 + 12 + 7 + 8 + 9 + 0) / 600, rel=1e-3)
    assert told["saturated_tokens_per_second"] == pytest.approx(1 / 6, rel=1e-3)
    pieces, lost = [step(n, n + 1, ["0"], prefill_starts=(5 * n,)) for n in range(3)], step(3, 4, preempted=("0",))
    assert tokens_recomputed(pieces) == 0, "pieces of a prompt are not computed twice"
    # The second time it has only got to 10 of its 15 tokens when it is preempted again.
    assert tokens_recomputed([*pieces, lost, *pieces[:2], lost, *pieces, step(9, 10, decoded=("0",))]) == 10 + 15
    assert tokens_recomputed([*pieces, lost, *pieces[2:]]) == 5, "the first ten tokens were found in the cache"


def test_stalls_and_overtaking_begin_beyond_their_bounds() -> None:
    for gap, stalls in ((4, 0), (5, 1)):
        between = [step(0, 1, [str(n)]) for n in range(1, gap)]
        assert decode_stalls([step(0, 1, ["0"]), *between, step(0, 1, decoded=("0",))], 4) == stalls
    later_first = [step(0, 1, ["1", "2", "3"]), step(1, 2, ["0"])]
    assert [requests_overtaken(later_first, bound=bound) for bound in (3, 2)] == [0, 1]
    assert requests_overtaken([step(0, 1, ["3", "2", "1", "0"])], bound=0) == 0
    again = [step(n, n + 1, [name]) for n, name in enumerate("010")]
    assert requests_overtaken(again, bound=0) == 0, "0 was begun in the first step, and preempted"
    numbers = [step(n, n + 1, [str(n)]) for n in range(12)]  # "10" comes after "9", not after "1"
    assert requests_overtaken(numbers, bound=0) == 0
