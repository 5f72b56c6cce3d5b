"""The simulated fleet: what holds for every trace, router and update, and one replica against a plain queue."""

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import CapacityError, ConfigError, RequestError
from shared.simulation.arrivals import SHAPES, Conversations, Request, arrival_times, conversations, recorded
from shared.simulation.blocks import SimulatedBlocks
from shared.simulation.fleet import Fleet, FleetPlan
from shared.simulation.replica import EngineLimits, Replica
from shared.simulation.results import serve
from shared.simulation.routing import ROUTERS, ByPrefix, LeastBusy, RoundRobin, TwoChoices
from shared.simulation.step_times import StepTimes

TIMES = StepTimes(step=0.01, prefill_step=0.002, prefill_token=1e-4, prefill_key=1e-7, decode_row=1e-3, decode_key=1e-6)
BLOCK = 4


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Requests that come together, one after the other or far apart, some with the same beginning."""
    now, found = 0.0, []
    for name in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.0, 0.004, 0.05, 1.0]))
        prompt, new = draw(st.integers(1, 40)), draw(st.integers(1, 12))
        num_shared = draw(st.integers(0, prompt // BLOCK))
        own = range(1000 * (name + 1), 1000 * (name + 1) + (prompt + new) // BLOCK - num_shared)
        found.append(Request(now, prompt, new, (*range(num_shared), *own)))
    return found


LIMITS = st.builds(
    EngineLimits,
    max_batch_size=st.integers(1, 4),
    max_num_batched_tokens=st.integers(1, 40),
    prefill_chunk_size=st.integers(1, 20),
    block_size=st.just(BLOCK),
    kv_tokens=st.integers(52, 200),
)
PLANS = st.builds(
    FleetPlan,
    replicas=st.integers(2, 5),
    router=st.sampled_from(sorted(ROUTERS)),
    gateways=st.integers(1, 3),
    report_seconds=st.sampled_from([0.0, 0.03]),
    update_at=st.sampled_from([None, 0.0, 0.1]),
    start_seconds=st.sampled_from([0.0, 0.2]),
)


class Watched(Fleet):
    """Notes the clock, and what is wrong while it runs."""

    def __init__(self, *arguments: object) -> None:
        self.clock: list[float] = []
        super().__init__(*arguments)  # type: ignore[arg-type]

    def _arrive(self, request: Request) -> None:
        self.clock.append(request.arrival)
        super()._arrive(request)
        assert request.replica in self.loads, "a replica that drains got a request"
        assert self.loads[request.replica] == self.replicas[request.replica].num_ongoing

    def _end_run(self, name: int, now: float) -> object:  # type: ignore[override]
        self.clock.append(now)
        yield from super()._end_run(name, now)
        replica = self.replicas[name]
        blocks = replica.blocks
        held = blocks.num_own + len(blocks.used) + len(blocks.cached)
        assert held <= blocks.num_blocks, "the KV cache holds more than it has"
        assert not blocks.used.keys() & blocks.cached.keys(), "a block in use could be evicted"
        assert replica.num_running <= replica.limits.max_batch_size


@settings(deadline=None)
@given(traces(), PLANS, LIMITS)
def test_each_request_ends_once_and_time_never_goes_back(
    trace: list[Request], plan: FleetPlan, limits: EngineLimits
) -> None:
    fleet = Watched(plan, TIMES, limits)
    done = list(fleet.run(trace))
    assert sorted(map(id, done)) == sorted(map(id, trace)), "a request was lost, or ended twice"
    assert all(before <= after for before, after in pairwise(fleet.clock)), "time went back"
    for request in trace:
        assert request.arrival <= request.scheduled < request.first_token <= request.ended, "a wait is negative"
        assert 0 <= request.num_cached < request.prompt_tokens
        assert math.isclose(request.ended, request.first_token) == (request.new_tokens == 1)
    for replica in fleet.replicas.values():
        assert not replica.num_ongoing
        assert replica.blocks.num_own == 0, "own blocks of requests that have ended"
        assert not replica.blocks.used, "blocks are used by none"


@settings(deadline=None)
@given(traces(), LIMITS)
def test_one_replica_is_a_plain_queue_that_runs_step_by_step(trace: list[Request], limits: EngineLimits) -> None:
    """The reference plans every step alone, and knows no events, runs or heaps."""
    served = list(Fleet(FleetPlan(1, "round-robin"), TIMES, limits).run(trace))
    expected = step_by_step(trace, limits)
    assert [trace.index(request) for request in served] == [number for number, *_ in expected], "another order of ends"
    for request, (_, first, ended) in zip(served, expected, strict=True):
        assert (request.first_token, request.ended) == pytest.approx((first, ended), rel=1e-9)


def step_by_step(trace: list[Request], limits: EngineLimits) -> list[tuple[int, float, float]]:
    """The number, first token and end of each request, in the order of their ends."""
    waiting, running, done, now = list(enumerate(trace)), list[dict[str, float]](), [], 0.0
    replica = Replica(TIMES, limits)  # for its blocks alone
    while waiting or running:
        if is_idle := not running and waiting[0][1].arrival >= now:
            now = waiting[0][1].arrival
        while waiting and (waiting[0][1].arrival < now or is_idle) and len(running) < limits.max_batch_size:
            if not replica.blocks.admit(waiting[0][1]):
                break
            is_idle = False  # the next one came a moment later
            number, request = waiting.pop(0)
            running.append({"number": number, "computed": request.num_cached, "tokens": 0, "first": 0.0})
        decoding = sorted((one for one in running if one["tokens"]), key=lambda one: one["first"])
        seconds = TIMES.step + sum(
            TIMES.decode_row + TIMES.decode_key * (trace[int(one["number"])].prompt_tokens + one["tokens"])
            for one in decoding
        )
        budget, chunks = max(limits.max_num_batched_tokens - len(decoding), 1), []
        for one in running:
            if not one["tokens"] and budget:
                left = trace[int(one["number"])].prompt_tokens - one["computed"]
                chunks.append((one, min(int(left), limits.prefill_chunk_size, budget)))
                budget -= chunks[-1][1]
        for one, size in chunks:
            keys = sum(one["computed"] + n + 1 for n in range(size))
            seconds += size * TIMES.prefill_token + keys * TIMES.prefill_key
        now += seconds + (TIMES.prefill_step if chunks else 0.0)
        for one in decoding:
            one["tokens"] += 1
        for one, size in chunks:
            one["computed"] += size
            if one["computed"] == trace[int(one["number"])].prompt_tokens:
                one["tokens"], one["first"] = 1, now
                replica.blocks.enter(trace[int(one["number"])])
        for one in [*decoding, *(one for one, _ in chunks)]:
            if one["tokens"] == trace[int(one["number"])].new_tokens:
                replica.blocks.release(trace[int(one["number"])])
                running.remove(one)
                done.append((int(one["number"]), one["first"], now))
    return done


@given(st.integers(0, 50), st.integers(0, 5000), st.integers(1, 60))
def test_many_steps_take_what_they_take_one_by_one(rows: int, keys: int, steps: int) -> None:
    one_by_one = [TIMES.decode(rows, keys + n * rows) for n in range(steps)]
    assert TIMES.decode(rows, keys, steps) == pytest.approx(sum(one_by_one))
    assert one_by_one[0] == pytest.approx(TIMES.step + rows * TIMES.decode_row + keys * TIMES.decode_key)
    for num in (1, steps // 2, steps):
        if num:
            assert TIMES.steps_within(sum(one_by_one[:num]) * (1 - 1e-9), rows, keys, steps) == num
            assert StepTimes(1.0, 0, 0, 0, 0, 0).steps_within(num, rows, keys, steps) == num, "exactly so long"


@given(st.integers(1, 300), st.integers(0, 300), st.data())
def test_chunks_of_a_prompt_attend_to_as_many_keys_as_the_whole(length: int, start: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, length))
    parts = TIMES.prefill(cut, start) + TIMES.prefill(length - cut, start + cut)
    assert parts == pytest.approx(TIMES.prefill(length, start))
    assert TIMES.prefill(1, start) == pytest.approx(TIMES.prefill_token + (start + 1) * TIMES.prefill_key)


@pytest.mark.parametrize("shape", SHAPES)
def test_arrivals_keep_their_rate_and_a_seed_repeats_them(shape: str) -> None:
    found = list(arrival_times(shape, 50.0, 200.0, 0))
    assert found == list(arrival_times(shape, 50.0, 200.0, 0)) == sorted(found)
    assert len(found) == pytest.approx(50 * 200, rel=0.05)
    quarter = sum(50 <= moment < 150 for moment in found) / len(found)
    assert (quarter > 0.6) == (shape == "day"), "noon is busier than midnight on a day alone"


def test_the_turns_of_a_conversation_begin_with_the_blocks_of_the_turn_before() -> None:
    options = Conversations(systems=4, system_tokens=64, turn_tokens=32, new_tokens=48, turns=3.0, pause=2.0)
    found = list(conversations(arrival_times("poisson", 20.0, 100.0, 0), options, 0))
    whole = {request.blocks: request for request in found}
    assert len(whole) > 0.99 * len(found), "requests have the same text"
    starts = {request.blocks[:n] for request in found for n in range(1, len(request.blocks) + 1)}
    continued = sum(request.blocks in starts for request in found if request.blocks)
    assert len({request.blocks[0] for request in found}) == 4, "each prompt begins with a system prompt"
    assert sum(len([1 for other in found if other.blocks[: len(one.blocks)] == one.blocks]) > 1 for one in found) > 300
    assert continued == len(found)
    assert all(request.prompt_tokens + request.new_tokens <= options.max_tokens for request in found)


def test_cached_blocks_go_from_the_end_of_an_answer_and_a_prefix_has_no_hole() -> None:
    blocks, first, other = SimulatedBlocks(6, BLOCK), Request(0.0, 8, 4, (1, 2, 3)), Request(0.0, 12, 4, (1, 2, 3))
    assert blocks.admit(first)
    blocks.enter(first)
    blocks.release(first)
    assert list(blocks.cached) == [3, 2, 1]
    del blocks.cached[2]
    assert blocks.admit(other)
    assert (other.num_shared, other.num_cached, other.num_own) == (1, 4, 3)


def test_routers_know_the_loads_of_the_last_report() -> None:
    fleet = Fleet(FleetPlan(2, "least-busy", report_seconds=1.0), TIMES, EngineLimits())
    fleet._arrive(Request(0.0, 8, 500, ()))
    assert (sorted(fleet.loads.values()), fleet.seen) == ([0, 1], {0: 0, 1: 0})
    (router,) = fleet.routers
    assert isinstance(router, LeastBusy)
    assert {load for load, *_ in router.heap} == {0}
    fleet.old = [name for name, load in fleet.loads.items() if load == 0]
    fleet._drain_next(0.5)
    assert (list(fleet.loads.values()), list(fleet.seen.values())) == ([1], [0]), "a replica that drains is no report"
    assert list(fleet._until(1.0)) == []
    assert fleet.seen == fleet.loads
    assert {(load, name) for load, _, name in router.heap} >= {(load, name) for name, load in fleet.loads.items()}


def test_a_turn_that_would_not_fit_begins_another_conversation() -> None:
    options = Conversations(1, system_tokens=16, turn_tokens=32, new_tokens=48, turns=9.0, pause=0.1, max_tokens=200)
    found = list(conversations(arrival_times("steady", 20.0, 10.0, 0), options, 0))
    assert max(request.prompt_tokens + request.new_tokens for request in found) <= 200
    assert max(request.prompt_tokens for request in found) > 100, "conversations have several turns"
    turns: dict[int, list[Request]] = {}
    for request in found:
        turns.setdefault(request.blocks[1], []).append(request)  # the first block after the system prompt's
    for before, after in (pair for each in turns.values() for pair in pairwise(each)):
        assert before.prompt_tokens + before.new_tokens < after.prompt_tokens, "another conversation has its blocks"


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    trace = [Request(0.0, 40, 4, tuple(range(11))), Request(10.0, 44, 4, tuple(range(12)))]
    (first, second) = Fleet(FleetPlan(1), TIMES, EngineLimits(block_size=BLOCK)).run(trace)
    assert (first.num_cached, second.num_cached) == (0, 43), "all whole blocks, and a token is left for the logits"


def test_a_request_that_cannot_be_admitted_ends_no_run() -> None:
    for limits, is_cut in ((EngineLimits(max_batch_size=1), False), (EngineLimits(kv_tokens=16), True)):
        replica = Replica(TIMES, limits)
        replica.add(Request(0.0, 4, 10, ()))
        now = replica.plan(0.0)
        assert now is not None
        replica.finish(now)
        for may_cut in (is_cut, False):  # the second waits for the first
            ends = replica.plan(now)
            replica.add(Request(now, 4, 10, ()))
            assert (replica.cut(now + 0.001) is not None) == may_cut
            assert (replica.ends == ends) != may_cut, "the run goes on as planned"


def test_routers_by_prefix_keep_a_conversation_at_its_replica_and_round_robin_does_not() -> None:
    options = Conversations(systems=1, system_tokens=0, turn_tokens=64, new_tokens=32, turns=6.0, pause=1.0)
    shares = {}
    for router in ROUTERS:
        fleet = Fleet(FleetPlan(4, router), TIMES, EngineLimits())
        done = list(fleet.run(conversations(arrival_times("poisson", 4.0, 200.0, 0), options, 0)))
        shares[router] = sum(one.num_cached for one in done) / sum(one.prompt_tokens for one in done)
    assert shares["prefix"] > 1.3 * shares["round-robin"], shares


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["loads known", "loads reported"])
def test_a_replica_that_drains_gets_no_request(seconds: float) -> None:
    plan = FleetPlan(3, "round-robin", update_at=1.9, start_seconds=1.0, report_seconds=seconds)
    trace = [Request(n / 100, 16, 20, ()) for n in range(400)]
    num_done = len(list(Fleet(plan, TIMES, EngineLimits()).run(trace)))
    assert num_done == 400, f"{400 - num_done} of 400 requests were lost in the update"
    late = [request.arrival for request in trace if request.replica == 0 and request.arrival > 1.9]
    assert not late, f"replica 0 drains from second 1.9 on and got {len(late)} requests, the first at {late[0]}"
    later = [Request(2.0 + n / 10, 16, 20, ()) for n in range(13)]
    list(Fleet(plan, TIMES, EngineLimits()).run(later))
    first = min((request.arrival for request in later if request.replica >= 3), default=math.inf)
    assert 2.85 < first < 3.25, f"an idle replica ends at 1.9, the next serves from 2.9 on and got a request at {first}"


@pytest.mark.parametrize("every", [0.1, 5.0], ids=["busy", "idle"])
def test_an_update_replaces_every_replica_and_waits_for_its_answers(every: float) -> None:
    trace = [Request(n * every, 16, 20, ()) for n in range(200)]
    fleet = Fleet(FleetPlan(3, "two-choices", update_at=2.0, start_seconds=1.0), TIMES, EngineLimits())
    num_done = len(list(fleet.run(trace)))
    assert num_done == 200, f"{200 - num_done} of 200 requests were lost in the update"
    assert len(fleet.replicas) == 6, f"{len(fleet.replicas) - 3} replicas were started for 3"
    assert sorted(fleet.loads) == [3, 4, 5], "an old replica serves on, or a new one does not"


def test_least_busy_is_least_busy() -> None:
    fleet = Fleet(FleetPlan(5, "least-busy"), TIMES, EngineLimits(max_batch_size=1))
    for n in range(40):
        request = Request(n * 0.02, 8, 8, ())
        list(fleet._until(request.arrival))
        before = dict(fleet.loads)
        fleet._arrive(request)
        assert before[request.replica] == min(before.values())


def test_routers_choose_by_loads_and_turns() -> None:
    request, loads = Request(0.0, 8, 8, ()), {3: 2, 4: 0, 5: 1}
    turns = RoundRobin(random.Random(0), BLOCK, 10)
    assert [turns.choose(request, [3, 4, 5], loads) for _ in range(4)] == [3, 4, 5, 3]
    assert [turns.choose(request, [4, 5], {4: 0, 5: 1}) for _ in range(3)] == [4, 5, 4], "3 is gone"
    ties = LeastBusy(random.Random(0), BLOCK, 10)
    for replica, load in (loads | {6: 0}).items():
        ties.report(replica, load)
    assert {ties.choose(request, [3, 4, 5, 6], loads | {6: 0}) for _ in range(20)} == {4, 6}
    pairs = TwoChoices(random.Random(0), BLOCK, 10)
    assert {pairs.choose(request, [3, 4], loads) for _ in range(9)} == {4}
    by_prefix = ByPrefix(random.Random(0), BLOCK, 10)
    by_prefix.choose(Request(0.0, 8, 8, (1, 2, 3, 4)), [3], {3: 0})
    assert by_prefix.table.matches((1, 2, 3, 4)) == {3: 2}, "the blocks of a prompt, and not of its answer"


def test_what_a_trace_says_of_waits_balance_and_cost() -> None:
    """Four requests far apart, of which the first counts nowhere, at two replicas in turns."""
    times = replace(TIMES, request=0.5)
    fleet = Fleet(FleetPlan(2, "round-robin"), times, EngineLimits())
    found = serve(fleet, [Request(10.0 * n, 8, 3, ()) for n in range(4)], 10.0, price=2.0)
    first, rest = times.decode(0, 0) + times.prefill_step + times.prefill(8, 0), times.decode(1, 9, 2)
    assert (found["requests"], found["requests_per_second"]) == (3, 3 / 20)
    assert found["first_token_ms"]["p50"] == pytest.approx(1e3 * (first + 0.5))
    assert found["request_mean_ms"] == pytest.approx(1e3 * (first + rest + 0.5))
    assert found["between_tokens_ms"]["p99"] == pytest.approx(1e3 * rest / 2)
    assert found["engine_ms"] == pytest.approx(1e3 * (first + rest))
    assert found["balance"] == pytest.approx(6 / 4.5)
    assert found["cost_per_thousand"] == pytest.approx(2 * 2.0 * 20 / 3600 / 3 * 1000)


def test_a_recorded_trace_is_read_and_stretched(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1030, "output_length": 0, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 20, "output_length": 5},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = recorded(path, 512)
    assert (first.arrival, first.prompt_tokens, first.new_tokens, first.blocks) == (0.0, 20, 5, ())
    assert (second.arrival, second.new_tokens, second.blocks) == (2.0, 1, (1, 2))
    assert [one.arrival for one in recorded(path, 512, rate=4.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    "line", ["no JSON", "[]", '{"timestamp": 0}', '{"timestamp":0,"input_length":0,"output_length":1}']
)
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n' + line)
    with pytest.raises(RequestError, match="Line 2 of the trace"):
        list(recorded(path, 512))


def test_wrong_settings_are_refused_with_their_value() -> None:
    for refused, said in (
        (lambda: FleetPlan(0), "replicas is 0"),
        (lambda: FleetPlan(2, "random"), "router is 'random'"),
        (lambda: FleetPlan(2, update_at=1.0, update_together=2), "update_together is 2"),
        (lambda: EngineLimits(max_batch_size=0), "max_batch_size is 0"),
        (lambda: StepTimes(-1.0, 0, 0, 0, 0, 0), "step is -1.0"),
        (lambda: StepTimes(0, 0, 0, 0, 0, 0), "step is 0; a step that computes nothing else"),
        (lambda: StepTimes.of({"step": 1.0}), "lack prefill_step, prefill_token"),
        (lambda: Conversations(turns=0.5), "turns is 0.5"),
        (lambda: list(arrival_times("tides", 1.0, 1.0, 0)), "arrivals are 'tides'"),
        (lambda: list(arrival_times("steady", 0.0, 1.0, 0)), "must be positive"),
    ):
        with pytest.raises(ConfigError, match=said):
            refused()
    with pytest.raises(CapacityError, match="A request has 60 tokens; a replica's KV cache holds 52"):
        list(Fleet(FleetPlan(1), TIMES, EngineLimits(block_size=4, kv_tokens=52)).run([Request(0.0, 50, 10, ())]))
