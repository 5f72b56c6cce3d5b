"""What a serving benchmark asks and what it makes of the answer: traces, percentiles, incidents, events. By hand."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import rounded
from benchmarks.run_matrix import OPTIMIZATIONS, REPLACED, add_gains, configurations
from benchmarks.serving.contenders import warm_up_trace
from benchmarks.serving.engine_load import OneAtATime, drive
from benchmarks.serving.lineup import draw_up
from benchmarks.serving.load_generator import EventReader, request_body
from benchmarks.serving.memory import BLOCK_SIZE, capacity_batch, check_sizes
from benchmarks.serving.results import (
    decode_stalls,
    figures,
    percentiles,
    ratio,
    requests_overtaken,
    saturated_figures,
    saturated_tokens_per_second,
    slot_utilisation,
    tokens_recomputed,
)
from benchmarks.serving.run import ServedRequest, ServedRun, TimedStep
from benchmarks.workloads.serving import DEMO, FULL, LARGE, ServingSize, Trace, TraceRequest, Workload, make_trace
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.errors import ConfigError, QueueFullError
from shared.lessons import lessons
from shared.text.stopping import FinishReason

MIXED = Workload("mixed", "Mixed", 40, 4, (8, 20), (3, 9))


def step(started: float, ended: float, **fields: Any) -> TimedStep:
    blank = {"step": 0, "finished": (), "failed": (), "num_running": 0, "num_waiting": 0}
    blank |= {"prefilled": (), "decoded": (), "kv_used_tokens": 0, "kv_capacity_tokens": 100}
    entries = fields.get("prefilled", ())  # ids, of which each has 5 tokens, or entries with their tokens
    fields["prefilled"] = tuple((entry, 5) if isinstance(entry, str) else entry for entry in entries)
    return TimedStep(started, ended, StepRecord(**(blank | fields)))


def request(arrived: float, scheduled: float | None, times: list[float], error: str | None = None) -> ServedRequest:
    return ServedRequest(arrived, 5, scheduled, times, list(range(len(times))), times[-1] if times else arrived, error)


# Traces


def test_a_trace_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert make_trace(MIXED, 100, seed=3) == make_trace(MIXED, 100, seed=3)
    assert make_trace(MIXED, 100, seed=3, rate=5.0) == make_trace(MIXED, 100, seed=3, rate=5.0)
    assert make_trace(MIXED, 100, seed=3) != make_trace(MIXED, 100, seed=4)
    assert make_trace(MIXED, 100, seed=3) != make_trace(replace(MIXED, name="other"), 100, seed=3)


def test_lengths_reach_both_bounds_and_ids_the_vocabulary() -> None:
    trace = make_trace(replace(MIXED, num_requests=400), 50, seed=0)
    assert {len(r.prompt_ids) for r in trace.requests} == set(range(8, 21))
    assert {r.new_tokens for r in trace.requests} == set(range(3, 10))
    assert {token for r in trace.requests for token in r.prompt_ids} == set(range(50))
    assert trace.new_tokens == sum(r.new_tokens for r in trace.requests)


@given(st.floats(0.01, 1000), st.integers(0, 2**32))
def test_poisson_arrivals_ascend_and_scale_with_the_rate(rate: float, seed: int) -> None:
    trace, once = make_trace(MIXED, 100, seed, rate), make_trace(MIXED, 100, seed, 1.0)
    times = [r.arrival for r in trace.requests]
    assert times[0] == 0
    assert times == sorted(times)
    assert trace.concurrency is None
    assert np.allclose(times, [r.arrival / rate for r in once.requests])
    loop = make_trace(MIXED, 100, seed)
    assert loop.concurrency == 4
    assert [(r.prompt_ids, r.new_tokens) for r in trace.requests] == [
        (r.prompt_ids, r.new_tokens) for r in loop.requests
    ]


def test_poisson_gaps_are_exponential() -> None:
    trace = make_trace(replace(MIXED, num_requests=4000, prompt_tokens=(1, 1)), 100, seed=1, rate=8.0)
    gaps = np.diff([r.arrival for r in trace.requests])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.08)
    assert (gaps > 1 / 8).mean() == pytest.approx(np.exp(-1), abs=0.03)


def test_a_shared_prefix_is_shared_and_no_more_than_that() -> None:
    trace = make_trace(Workload("w3", "W3", 10, 2, (36, 40), (2, 2), shared_prefix_tokens=32), 10_000, seed=0)
    assert len({r.prompt_ids[:32] for r in trace.requests}) == 1
    assert len({r.prompt_ids[32:] for r in trace.requests}) == 10
    assert all(36 <= len(r.prompt_ids) <= 40 for r in trace.requests)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_requests": 0}, "num_requests of workload mixed is 0"),
        ({"concurrency": 0}, "concurrency of workload mixed is 0"),
        ({"prompt_tokens": (9, 8)}, "between 9 and 8"),
        ({"new_tokens": (0, 3)}, "between 0 and 3"),
        ({"shared_prefix_tokens": 8}, "a token of its own"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(MIXED, **change)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="it must be positive"):
        make_trace(MIXED, 100, seed=0, rate=rate)


def test_the_sizes_are_those_of_the_course() -> None:
    assert (FULL.w1.prompt_tokens, FULL.w1.new_tokens) == ((256, 256), (256, 256))
    assert (FULL.w2.concurrency, FULL.w2.prompt_tokens, FULL.w2.new_tokens) == (16, (32, 1024), (64, 256))
    assert (FULL.tail.num_requests, FULL.max_batch_size) == (512, 16)
    assert (FULL.tail.prompt_tokens, FULL.tail.new_tokens) == (FULL.w2.prompt_tokens, FULL.w2.new_tokens)
    assert FULL.backlog.concurrency == FULL.max_batch_size + 64
    assert (FULL.together.num_requests, FULL.together.new_tokens) == (64, (128, 128))
    assert LARGE.w2.concurrency == LARGE.max_batch_size == 64
    assert list(DEMO.workloads) == ["w1", "w2", "w3"]
    assert (FULL.capacity.prompt_tokens, FULL.capacity.new_tokens) == (FULL.w2.prompt_tokens, FULL.w2.new_tokens)
    assert (FULL.wide_slots[1], FULL.capacity.longest) == (4096, 1280)
    assert DEMO.with_tail_requests(5).tail.num_requests == 5


@pytest.mark.parametrize("size", [FULL, LARGE, DEMO])
def test_the_memory_of_capacity_divides_into_slots_and_blocks_and_leaves_a_queue(size: ServingSize) -> None:
    check_sizes(size)
    num_tight = size.capacity_tokens // size.capacity.longest
    num_wide = size.wide_slots[0]
    # The slots' widths are to each other as 4,096 to 1,280, whatever the scale.
    assert num_tight / num_wide == pytest.approx(4096 / 1280)
    mean = np.mean(size.capacity.prompt_tokens) + np.mean(size.capacity.new_tokens)
    fit = size.capacity_tokens / (mean + BLOCK_SIZE / 2)
    assert num_tight < fit < size.capacity.num_requests / 2, "more wait than run"
    assert capacity_batch(size) > 1.4 * fit, "memory is what limits them"
    assert size.capacity.concurrency == size.capacity.num_requests


@pytest.mark.parametrize("wide", [(5, 250), (3, 256), (0, 256), (16, 64)])
def test_a_memory_that_does_not_divide_is_refused(wide: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"{wide[0]} slots of {wide[1]} tokens"):
        check_sizes(replace(DEMO, wide_slots=wide))


def test_a_warm_up_fits_into_the_memory_half_of_it_prompts() -> None:
    slots = warm_up_trace(16, 1280, is_gpu=True)
    assert slots == warm_up_trace(16, 1280, is_gpu=True, capacity_tokens=16 * 1280)
    assert [r.new_tokens for r in slots.requests] == list(range(2, 18)), "the batch shrinks by one a step"
    blocks = warm_up_trace(238, 4096, is_gpu=True, capacity_tokens=81_920)
    assert sum(len(r.prompt_ids) for r in blocks.requests) <= 81_920 / 2
    running = [sum(len(r.prompt_ids) + step for r in blocks.requests if r.new_tokens > step) for step in range(240)]
    assert max(running) <= 81_920, "nobody is preempted"
    assert [len(r.prompt_ids) for r in warm_up_trace(16, 8, is_gpu=False).requests] == [4, 4]


# Results


def test_percentiles_are_interpolated_and_in_milliseconds() -> None:
    # Of 1 … 5 s the place of P95 is 0.95 · 4 = 3.8, between the fourth and the fifth.
    assert percentiles([5.0, 3.0, 1.0, 2.0, 4.0]) == {"p50": 3000.0, "p95": 4800.0, "p99": 4960.0}
    assert percentiles([0.25]) == {"p50": 250.0, "p95": 250.0, "p99": 250.0}
    assert percentiles([]) is None


def test_figures_by_hand() -> None:
    run = ServedRun(
        [
            request(0.0, 1.0, [2.0, 3.0, 5.0]),
            request(1.0, 4.0, [5.0, 6.0]),
            request(2.0, None, [], error="the queue is full"),
        ],
        steps=[
            step(1.0, 2.0, prefilled=["0"], kv_used_tokens=10),
            step(2.0, 3.0, decoded=("0",), kv_used_tokens=20),
            step(4.0, 5.0, prefilled=["1"], decoded=("0",), kv_used_tokens=30),
            step(5.0, 6.0, decoded=("1",), kv_used_tokens=0),
        ],
        num_forwards=5,
    )
    found = figures(run, max_batch_size=2, max_decode_interval=4)
    assert (found["num_requests"], found["num_finished"], found["num_errors"]) == (3, 2, 1)
    assert (found["output_tokens"], found["seconds"]) == (5, 6.0)
    assert found["output_tokens_per_second"] == pytest.approx(5 / 6, rel=1e-3)
    assert found["requests_per_second"] == pytest.approx(2 / 6, rel=1e-3)
    assert found["queue_wait_ms"]["p50"] == 2000  # 1 s and 3 s
    assert found["time_to_first_token_ms"]["p50"] == 3000  # 2 s and 4 s
    assert found["inter_token_latency_ms"]["p50"] == 1000  # 1, 2 and 1 s
    assert found["request_latency_ms"]["p50"] == 5000  # 5 s and 5 s
    assert found["steps"] == 4
    assert found["forward_passes"] == 5
    assert found["slot_utilisation"] == 5 / 8
    assert found["kv_utilisation"] == 0.15
    assert found["mean_step_ms"] == 1000
    assert found["decode_stalls"] == found["requests_overtaken"] == 0


def test_a_request_that_was_preempted_counts_from_its_first_prefill() -> None:
    """Request 1 is computed, preempted, and computed anew with the two tokens it had; 2 is preempted uncomputed."""
    steps = [
        step(0, 1, prefilled=["0", "1"], num_waiting=1, num_running=2, kv_used_tokens=10),
        step(1, 2, decoded=("0", "1"), num_waiting=1, num_running=3, kv_used_tokens=12),
        step(2, 3, decoded=("0",), preempted=("2", "1"), num_waiting=2, num_running=1, kv_used_tokens=7),
        step(3, 4, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=8),
        step(4, 5, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=9),
        step(5, 6, decoded=("0",), finished=("0",), num_waiting=2, num_running=0),
        step(6, 7, prefilled=[("1", 7), "2"], num_running=2, kv_used_tokens=12),
        step(7, 8, decoded=("1", "2"), finished=("1", "2")),
    ]
    # Of the 7 tokens 5 were its prompt's and 1 its first answer's; the last it would have computed in any case.
    assert tokens_recomputed(steps) == 6
    assert decode_stalls(steps, max_decode_interval=4) == 0, "who is preempted does not decode"
    assert requests_overtaken(steps, bound=0) == 0, "it was begun in the first step"
    run = ServedRun([request(0.0, 0.0, [1.0])], steps, num_forwards=8)
    found = figures(run, max_batch_size=3, max_decode_interval=4)
    assert (found["preemptions"], found["tokens_recomputed"]) == (2, 6)
    # Of the six steps that left any waiting: who held memory in them, those who ended in them too.
    told = saturated_figures(run)
    assert told["peak_concurrent"] == 3
    assert told["mean_concurrent"] == rounded((2 + 3 + 1 + 1 + 1 + 1) / 6)
    assert told["saturated_kv_utilisation"] == rounded((10 + 12 + 7 + 8 + 9 + 0) / 600)
    assert told["saturated_tokens_per_second"] == rounded(1 / 6)


def test_overtaking_is_counted_by_the_first_prefill() -> None:
    again = [step(0, 1, prefilled=["0"]), step(1, 2, prefilled=["1"]), step(2, 3, preempted=("0",))]
    assert requests_overtaken([*again, step(3, 4, prefilled=[("0", 6)])], bound=0) == 0


def test_pieces_of_a_prompt_and_a_second_preemption_are_told_from_recomputing() -> None:
    pieces = [step(n, n + 1, prefilled=["0"]) for n in range(3)]
    assert tokens_recomputed(pieces) == 0
    lost = step(3, 4, preempted=("0",))
    assert tokens_recomputed([*pieces, lost, *pieces]) == 15
    # The second time it has only got to 10 of its 15 tokens when it is preempted again.
    assert tokens_recomputed([*pieces, lost, *pieces[:2], lost, *pieces, step(9, 10, decoded=("0",))]) == 10 + 15


def test_what_only_steps_tell_is_absent_without_them() -> None:
    found = figures(ServedRun([request(0.0, None, [1.0])], steps=None, num_forwards=None), 4, 4)
    assert found["queue_wait_ms"] is found["slot_utilisation"] is found["decode_stalls"] is None
    assert found["request_latency_ms"]["p99"] == 1000


def test_a_stall_is_a_gap_of_more_steps_than_allowed() -> None:
    def steps(gap: int) -> list[TimedStep]:
        between = [step(0, 1, prefilled=[str(n)]) for n in range(1, gap)]
        return [step(0, 1, prefilled=["0"]), *between, step(0, 1, decoded=("0",))]

    assert decode_stalls(steps(4), max_decode_interval=4) == 0
    assert decode_stalls(steps(5), max_decode_interval=4) == 1


def test_overtaken_is_who_was_begun_after_too_many_that_came_later() -> None:
    later_first = [step(0, 1, prefilled=["1", "2", "3"]), step(1, 2, prefilled=["0"])]
    assert requests_overtaken(later_first, bound=3) == 0
    assert requests_overtaken(later_first, bound=2) == 1
    together = [step(0, 1, prefilled=["3", "2", "1", "0"])]
    assert requests_overtaken(together, bound=0) == 0
    numbers = [step(n, n + 1, prefilled=[str(n)]) for n in range(12)]  # "10" comes after "9", not after "1"
    assert requests_overtaken(numbers, bound=0) == 0


def test_saturated_throughput_ends_with_the_last_step_that_left_any_waiting() -> None:
    steps = [step(0, 1, num_waiting=3), step(1, 2, num_waiting=1), step(2, 4, num_waiting=0), step(4, 9)]
    run = ServedRun([request(0.0, 0.0, [1.0, 2.0, 4.0, 9.0]), request(0.0, 0.0, [2.0, 4.0])], steps, 4)
    assert saturated_tokens_per_second(run) == 3 / 2
    never = ServedRun([request(0.0, 0.0, [1.0, 2.0])], [step(0, 1), step(1, 2)], 2)
    assert saturated_tokens_per_second(never) == 2 / 2


def test_slots_and_ratios() -> None:
    assert slot_utilisation([step(0, 1, prefilled=["0"], decoded=("1", "2")), step(1, 2, decoded=("1",))], 4) == 0.5
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None


# The lineup


def phase(number: str, *, many: bool = True, continuous: bool = True, blocks: bool = True) -> Any:
    engine = SimpleNamespace(SCHEDULERS={"continuous": 0} if continuous else {}, POOLS={"paged": 0} if blocks else {})
    shown = SimpleNamespace(add_request=0) if many else SimpleNamespace()
    return SimpleNamespace(number=number, engine=shown, load=lambda part: engine)


def test_each_idea_is_shown_by_its_own_phase_and_the_newest_stands_beside_them() -> None:
    main = [
        phase("03", many=False),
        phase("03.1", many=False),
        phase("04", continuous=False, blocks=False),
        phase("05", blocks=False),
        phase("06"),
        phase("06.1"),
        phase("07"),
    ]
    every = ("sequential", "padded", "static", "continuous", "paged", "newest")
    for last, number_of_contenders in (("05", 4), ("06", 5), ("06.1", 6), ("07", 6)):
        found = draw_up(main, next(lesson for lesson in main if lesson.number == last))
        assert found.contenders == every[:number_of_contenders]
        assert (found.sequential.number, found.slots.number, found.newest.number) == ("03.1", "05", last)
        in_blocks = [lesson.number for lesson in found.in_blocks.values()]
        assert in_blocks == {"05": [], "06": ["06"]}.get(last, ["06", last])
    side = draw_up(main, phase("06.2"))
    assert side.in_blocks["newest"].number == "06.2"


# The loop


class Clockwork:
    """An engine without a model: a step takes ``seconds`` and gives each running request its place in the answer."""

    def __init__(self, max_running: int, seconds: float = 0.0, max_waiting: int = 99) -> None:
        self.max_running, self.seconds, self.max_waiting = max_running, seconds, max_waiting
        self.waiting: list[tuple[str, int]] = []
        self.running: dict[str, list[int]] = {}
        self.most_open = self.num_forwards = self.num_tokens_computed = 0
        self.last_step: StepRecord | None = None
        self.aborted: list[str] = []

    def add_request(self, prompt: Any, params: Any, request_id: str | None = None) -> str:
        assert request_id is not None
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError("the queue is full")
        self.waiting.append((request_id, params.max_new_tokens))
        self.most_open = max(self.most_open, len(self.waiting) + len(self.running))
        return request_id

    def step(self) -> list[StepOutput]:
        time.sleep(self.seconds)
        joined = []
        while self.waiting and len(self.running) < self.max_running:
            name, tokens = self.waiting.pop(0)
            self.running[name] = [0, tokens]
            joined.append(name)
        outputs = []
        for name, count in list(self.running.items()):
            count[0] += 1
            is_last = count[0] == count[1]
            outputs.append(StepOutput(name, count[0], "", FinishReason.LENGTH if is_last else None))
            if is_last:
                del self.running[name]
        decoded = tuple(o.request_id for o in outputs if o.request_id not in joined)
        self.last_step = step(0, 0, prefilled=joined, decoded=decoded, num_waiting=len(self.waiting)).record
        self.num_forwards += 1
        return outputs

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        self.waiting = [entry for entry in self.waiting if entry[0] != request_id]
        return self.running.pop(request_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)


def test_a_closed_loop_keeps_so_many_open_and_answers_all() -> None:
    trace = make_trace(MIXED, 100, seed=0)
    engine = Clockwork(max_running=2)
    run = drive(engine, trace)
    assert engine.most_open == 4
    assert [len(r.token_ids) for r in run.requests] == [r.new_tokens for r in trace.requests]
    assert [r.token_ids for r in run.requests] == [list(range(1, r.new_tokens + 1)) for r in trace.requests]
    assert all(r.arrived <= r.scheduled < r.token_times[0] <= r.token_times[-1] == r.ended for r in run.requests)
    assert run.num_forwards == len(run.steps) == engine.num_forwards
    assert run.num_tokens == trace.new_tokens
    assert not run.is_cut
    # Behind the first four, each comes in the moment in which another ended.
    ends = sorted(r.ended for r in run.requests)
    assert [r.arrived for r in run.requests] == [0.0] * 4 + ends[: len(run.requests) - 4]


def test_by_the_clock_a_request_waits_from_its_arrival_whoever_was_busy() -> None:
    requests = (TraceRequest((1,), 1, 0.0), TraceRequest((1,), 1, 0.005), TraceRequest((1,), 1, 0.15))
    run = drive(Clockwork(max_running=1, seconds=0.05), Trace(requests, concurrency=None))
    first, second, third = run.requests
    assert [r.arrived for r in run.requests] == [0.0, 0.005, 0.15]
    assert second.scheduled >= first.ended >= 0.05
    assert second.scheduled - second.arrived >= 0.045
    assert third.scheduled >= 0.15
    assert len(run.steps) == 3, "it sleeps, and does not step, while nobody is there"


def test_a_refused_request_is_an_error_and_frees_its_place() -> None:
    trace = Trace(tuple(TraceRequest((1,), 2) for _ in range(6)), concurrency=5)
    run = drive(Clockwork(max_running=1, max_waiting=2), trace)
    assert [r.error is None for r in run.requests] == [True, True, False, False, False, False]
    assert [len(r.token_ids) for r in run.finished] == [2, 2]


def test_a_run_that_takes_too_long_is_cut_and_leaves_nothing_behind() -> None:
    trace = Trace(tuple(TraceRequest((1,), 1000) for _ in range(3)), concurrency=3)
    engine = Clockwork(max_running=2, seconds=0.01)
    run = drive(engine, trace, max_seconds=0.05)
    assert run.is_cut
    assert sorted(engine.aborted) == ["0", "1", "2"]
    assert not engine.has_work()
    assert run.finished == []
    assert 0 < run.num_tokens < 20
    assert figures(run, 2, 4)["num_errors"] == 0


def test_one_at_a_time_answers_in_order_and_counts_its_steps() -> None:
    def generate(prompt: Any, params: Any) -> Any:
        for n in range(params.max_new_tokens):
            is_last = n == params.max_new_tokens - 1
            yield StepOutput("its own id", prompt[0] + n, "", FinishReason.LENGTH if is_last else None)

    queue = OneAtATime(SimpleNamespace(generate=generate, num_tokens_computed=7))
    trace = Trace((TraceRequest((10,), 3), TraceRequest((20,), 1), TraceRequest((30,), 2)), concurrency=3)
    run = drive(queue, trace)
    assert [r.token_ids for r in run.requests] == [[10, 11, 12], [20], [30, 31]]
    assert [s.record.prefilled for s in run.steps if s.record.prefilled] == [(("0", 1),), (("1", 1),), (("2", 1),)]
    assert run.num_forwards == 6
    assert slot_utilisation(run.steps, 1) == 1
    assert [s.record.num_waiting for s in run.steps] == [2, 2, 2, 1, 0, 0]
    assert queue.num_tokens_computed == 7
    queue.add_request((1,), SimpleNamespace(max_new_tokens=2), "a")
    queue.add_request((1,), SimpleNamespace(max_new_tokens=2), "b")
    queue.step()
    assert queue.abort("a")
    assert queue.abort("b")
    assert not queue.abort("b")
    assert not queue.has_work()


# Events


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=6), st.data())
def test_events_are_read_however_the_bytes_arrive(texts: list[str], data: st.DataObject) -> None:
    stream = "".join(f": still here\n\nevent: token\ndata: [{text}]\n\n" for text in texts) + "data: [DONE]\n\n"
    raw = stream.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, events = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        events += reader.feed(raw[start:end])
    assert events == [("token", f"[{text}]") for text in texts] + [(None, "[DONE]")]
    assert reader.rest == b""


def test_a_request_asks_for_what_the_engine_alone_is_asked() -> None:
    body = request_body(TraceRequest((4, 5), 9), "m")
    assert body["prompt"] == [4, 5]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (9, 0, True)


# The matrix


def test_every_phase_has_a_row_and_each_of_its_optimizations_another() -> None:
    rows = configurations([lesson for lesson in lessons() if lesson.generates])
    found = [row.name for row in rows]
    assert found[:5] == ["02", "03", "03.1", "04", "05"]
    assert found[5:7] == ["05 scheduler_policy=prefill_first", "05 scheduler_policy=decode_round_robin"]
    assert found[7:9] == ["06", "06 kv_cache_backend=contiguous"]
    assert set(OPTIMIZATIONS) | set(REPLACED) <= set(EngineConfig.__dataclass_fields__)
    for row in rows:
        EngineConfig(**row.settings).check(row.lesson.load("engine").SUPPORTED)
    numbers = ["05", "06", "06.1", *(f"{n:02}" for n in range(7, 11))]
    later = configurations([SimpleNamespace(number=number) for number in numbers])  # type: ignore[misc]
    for row in later:
        EngineConfig(**row.settings)  # what a setting needs is beside it
    assert [row.name for row in later if row.settings] == [
        "05 scheduler_policy=prefill_first",
        "05 scheduler_policy=decode_round_robin",
        "06 kv_cache_backend=contiguous",
        "06.1 attention_backend=flash",
        "07 use_chunked_prefill=True",
        "08 kv_cache_backend=paged use_prefix_caching=True",
        "09 use_cuda_graphs=True",
        "10 quantization=fp8",
        "10 quantization=int8",
    ]


def test_on_a_cpu_no_row_repeats_another_under_a_kernels_name() -> None:
    found = [SimpleNamespace(number=number) for number in ("06", "06.1")]
    names = [row.name for row in configurations(found, "cpu")]  # type: ignore[arg-type]
    assert names == ["06", "06 kv_cache_backend=contiguous", "06.1"]


def test_gains_are_over_the_first_row_and_over_the_phase_before_in_its_defaults() -> None:
    def row(phase: str, speed: float) -> dict[str, Any]:
        return {"phase": phase, "w1": {"output_tokens_per_second": speed}}

    results = {"02": row("02", 10.0), "04": row("04", 40.0), "05": row("05", 60.0), "05 x=1": row("05", 20.0)}
    add_gains(results, {"02": "01b", "01b": None, "03": "02", "04": "03", "05": "04"}, ["w1"])
    assert [r["w1"]["gain_over_first"] for r in results.values()] == [1.0, 4.0, 6.0, 2.0]
    assert [r["w1"]["gain_over_previous"] for r in results.values()] == [None, 4.0, 1.5, 0.5]
