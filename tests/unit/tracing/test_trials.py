"""Runs that are compared: the turns they take, the blocks they show, and where a page says to look."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from shared.tracing import trials
from shared.tracing.focus import Focus, focus
from shared.tracing.holdings import memory_data
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import totals_rows
from shared.tracing.trace import Trace
from shared.tracing.trials import TracedRun, record
from shared.tracing.workload import Arrival, run
from tests.unit.tracing.recording import arrivals, make_engine, recorded


def test_runs_take_turns_and_the_first_round_counts_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"phase": "08", "max_batch_size": 2, "num_gpu_blocks": 32, "block_size": 4}
    engines = [make_engine(folder, **options) for _ in range(2)]
    runs = [TracedRun("xy"[n], engine, arrivals(3, 2, 4), {}) for n, engine in enumerate(engines)]
    order: list[int] = []
    nanoseconds = iter([1000, 1000, 15, 17, 13, 11, 14, 19])  # between two looks at the clock in a round

    def noted(recorder: Recorder, workload: list[Arrival]) -> None:
        order.append(engines.index(recorder.engine))
        clock = itertools.count(0, next(nanoseconds))
        recorder.zero_ns, recorder.clock = 0, lambda: next(clock)
        run(recorder, workload)

    monkeypatch.setattr(trials, "run", noted)
    found = record(runs)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0]
    assert [trace.title for trace in found] == ["x", "y"]
    # In rounds 2 to 4 a part of a step of the first took 17, 13 and 19 ns, of the second 15, 11 and 14.
    parts = [trace.steps[0].host[0] for trace in found]
    assert [part.ended_ns - part.started_ns for part in parts] == [17, 14]
    held = memory_data(found[0])
    assert held is not None
    assert [told["blocks"] for told in held["holdings"]] == _blocks(make_engine(folder, **options))
    assert not any(request.num_cached_tokens for trace in found for request in trace.requests)
    order.clear()
    nanoseconds = iter([10])
    assert len(record(runs[:1])) == len(order) == 1, "a run that is compared with none runs once"


def test_a_run_whose_steps_differ_between_trials_shows_those_of_its_median(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [TracedRun(title, make_engine(folder, "06"), arrivals(3, 2, 4), {}) for title in "xy"]
    lengths = iter([2, 2, 3, 3, 3, 3, 3, 3])  # requests in each turn: as adaptive drafts do, the steps change
    monkeypatch.setattr(trials, "run", lambda recorder, workload: run(recorder, workload[: next(lengths)]))
    for trace in record(runs):
        assert len(trace.requests) == 3
        assert max(step.num_served for step in trace.steps) == 3


def _blocks(engine: Any) -> Any:
    """The blocks of the same requests in a pool that nothing has used before."""
    held = memory_data(recorded(engine, arrivals(3, 2, 4)))
    assert held is not None
    return [told["blocks"] for told in held["holdings"]]


def test_a_page_says_where_to_look(crowded: Trace, traces: list[Trace], folder: Path) -> None:
    told = "in step 7 blocks run out, and request b is preempted. Step 15 recomputes its tokens."
    assert focus(crowded) == Focus(7, told)
    static, continuous = traces
    assert focus(static) == Focus(1, "step 1 runs 1 of 2 rows while 1 request waits: the batch has to end first.")
    assert focus(continuous) == Focus(1, "no request waits; step 1 holds the most memory.")
    few = recorded(make_engine(folder, max_batch_size=1), arrivals(3, 2))
    assert focus(few) == Focus(3, "request b waits until step 3, when a finished request frees its memory.")
    recorder = Recorder(make_engine(folder, max_batch_size=1))
    for arrival in arrivals(3, 2):
        recorder.add_request(arrival.prompt_ids, arrival.params, arrival.request_id)
    recorder.step()
    assert focus(recorder.trace("b waits still")).step == 0
    stalled = make_engine(folder, max_batch_size=2, scheduler_policy="prefill_first")
    trace = recorded(stalled, arrivals(4, 2, steps=(0, 2)))
    assert focus(trace) == Focus(2, "from step 2 on request a stalls for 1 step during the prefill of request b.")
    chunked = make_engine(folder, "07", max_batch_size=3, prefill_chunk_size=2, max_prefill_chunks_per_step=1)
    trace = recorded(chunked, arrivals(9, 9, 2, steps=(0, 1, 4)))
    c = trace.requests[2]
    assert [trace.chunks(request) for request in (trace.requests[1], c)] == [
        [(1, 0, 2), (2, 2, 1)],
        [(4, 0, 2), (5, 2, 2)],
    ]
    told = "step 5 computes a chunk, tokens 2 to 3 of the prompt of request c, while 2 requests decode."
    assert focus(trace) == Focus(5, told)


def test_the_written_share_is_that_of_all_steps_and_unused_blocks_are_not_drawn(folder: Path) -> None:
    trace = recorded(make_engine(folder, "06", max_batch_size=2, num_gpu_blocks=64, block_size=4), arrivals(4))
    # The prompt of 2 tokens, then 3 and 4, in one block; 5 in two; the step that ends frees both.
    held = [(step.memory.num_written, step.memory.num_held) for step in trace.steps if step.memory is not None]
    share = sum(written for written, _ in held) / (4 * sum(blocks for _, blocks in held))
    assert trace.totals.written_share == share
    assert (trace.totals.most_served, dict(totals_rows([trace]))["written share of held KV cache"]) == (
        1,
        [f"{share:.1%}"],
    )
    memory = memory_data(trace)
    assert memory is not None
    assert (memory["num_blocks"], memory["num_shown"]) == (64, 8)
