"""Few blocks: preempted requests, and the owner of each block, in the trace and in both files."""

from pathlib import Path

from shared.engine.config import EngineConfig
from shared.engine.memory_map import Holding, HoldingState, MemoryMap
from shared.engine.record import StepRecord
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.chrome import chrome_trace
from shared.tracing.focus import focus
from shared.tracing.holdings import memory_data
from shared.tracing.timeline_page import page, totals_rows
from shared.tracing.told import request_texts
from shared.tracing.trace import Outcome, Trace, TracedRequest, TracedStep
from shared.tracing.workload import Arrival
from tests.unit.tracing.recording import D, P, Q, R, X, kinds, make_engine, recorded
from tests.unit.tracing.written import check_events, embedded, table


def test_a_preemption_in_the_cells_and_totals(crowded: Trace) -> None:
    """After 16 tokens each all blocks are full: b goes in step 7, and comes again when a has ended."""
    a, b = crowded.requests
    assert kinds(crowded) == {"a": [P] + [D] * 14, "b": [P] + [D] * 6 + [X] * 8 + [R] + [D] * 2}
    assert [crowded.preemptions(request) for request in (a, b)] == [[], [7]]
    assert crowded.chunks(b) == [(0, 0, 10), (15, 0, 17)], "a prompt that is recomputed begins anew"
    assert [(c.kind, c.num_tokens) for c in crowded.cells(b)][15] == (R, 10 + 7)
    totals = crowded.totals
    assert (totals.num_preemptions, totals.num_recomputed_tokens) == (1, 17)
    assert totals.mean_queue_steps == 0, "the wait after a preemption is none in the queue"
    assert [cell.step for cell in crowded.cells(b) if cell.kind in (P, D, R)] == [token.step for token in b.tokens]
    rows = dict(totals_rows([crowded]))
    assert (rows["preemptions"], rows["recomputed tokens"]) == (["1"], ["17"])
    html = page([crowded], "x")
    assert table(html, "Requests, here")[1] == ["b", "10", "10", "0", "0", "1", "8", "0", "8", "1", "finished (length)"]
    assert table(html, "Steps, here")[7][2] == "b"


def test_a_preemption_in_the_chrome_trace(crowded: Trace) -> None:
    events = chrome_trace([crowded])["traceEvents"]
    check_events(events)
    (event,) = [event for event in events if event["name"] == "preempted"]
    assert (event["ph"], event["tid"], event["ts"]) == ("i", 3, crowded.steps[7].started_ns / 1000)
    assert [(e["tid"], e["args"]["tokens"]) for e in events if e["name"] == "recompute"] == [(3, 17)]
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


def test_a_region_is_held_from_the_first_token_to_the_last(traces: list[Trace]) -> None:
    memory = embedded(page(traces[:1], "x"))["traces"][0]["memory"]
    assert (memory["unit"], memory["block_tokens"], memory["num_blocks"]) == ("region", 128, 2)
    assert [told["blocks"] for told in memory["holdings"]] == [[[0, 0, 2]], [], [[0, 3, 6]], [[0, 9, 10]]]
    assert memory["holdings"][0]["written"] == [2, 3, 0]


def test_blocks_that_are_exchanged_and_freed_and_the_last_that_is_drawn() -> None:
    tables = [(3, 5), (5, 3), (5,), (5, 8), ()]
    steps = []
    for n, blocks in enumerate(tables):
        holding = Holding("a", HoldingState.DECODE, 2, 4, len(blocks), 0, blocks)
        other = Holding("b", HoldingState.DECODE, 2, 4, 1, 0, (7,))
        memory = MemoryMap("block", 4, 64, 0, 0, (holding, other) if blocks else (other,), ())
        steps.append(TracedStep(StepRecord(n, (), ("a",), (), (), 0, 1, 0, 256), 10 * n, 10 * n + 9, memory))
    found = memory_data(Trace("x", 2, tuple(steps), tuple(TracedRequest(name, 2, 9, 0, 0) for name in "ab")))
    assert found is not None
    blocks = [[3, 0, 1], [5, 0, 1], [5, 1, 4], [3, 1, 2], [8, 3, 4]]
    assert sorted(found["holdings"][0]["blocks"]) == sorted(blocks)
    assert found["holdings"][0]["written"] == [2, 2, 1, 2, 0]
    assert found["holdings"][1]["blocks"] == [[7, 0, 5]], "held to the end of the trace"
    assert found["num_shown"] == 16, "block 8 is the ninth"


def test_a_request_preempted_before_its_prompt_was_run_is_not_recomputed() -> None:
    records = [
        StepRecord(0, (), (), (), (), 0, 1, 0, 64),
        StepRecord(1, (), (), (), (), 1, 0, 0, 64, preempted=("a",)),
        StepRecord(2, (("a", 3),), (), ("a",), (), 0, 0, 3, 64, prefill_starts=(0,)),
    ]
    steps = tuple(TracedStep(record, 10 * n, 10 * n + 9) for n, record in enumerate(records))
    request = TracedRequest("a", 3, 1, 0, 0, end_step=3, ended_ns=29, outcome=Outcome.FINISHED)
    trace = Trace("x", 1, steps, (request,))
    assert kinds(trace) == {"a": [Q, X, P]}
    assert trace.totals.num_recomputed_tokens == 0
    assert embedded(page([trace], "x"))["traces"][0]["memory"] is None, "no map was made of these steps"


def test_shared_and_cached_blocks_in_the_page_and_totals(folder: Path) -> None:
    """b waits until a's 9 tokens are computed, and shares the two blocks that they fill; of c all but one are found."""
    config = EngineConfig(model=str(folder), max_seq_len=32, seed=0, block_size=4, num_gpu_blocks=9)
    engine = find_lesson("08").engine(config)
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    requests = ((0, "a", 9), (0, "b", 9), (6, "c", 8))
    workload = [Arrival(step, name, tuple(range(1, length + 1)), params) for step, name, length in requests]
    trace = recorded(engine, workload)
    assert kinds(trace) == {"a": [P] + [D] * 3, "b": [Q, P] + [D] * 3, "c": [P] + [D] * 3}
    assert [request.num_cached_tokens for request in trace.requests] == [0, 8, 7]
    assert (trace.totals.num_cached_tokens, trace.totals.num_prompt_tokens) == (15, 26)
    assert dict(totals_rows([trace]))["prompt tokens from the cache"] == ["15 of 26"]
    assert focus(trace).step == 1
    assert focus(trace).text == "in step 1 request b begins, with 8 of its 9 prompt tokens from the cache."
    assert request_texts(trace)[1][1].startswith("prefill of token 8 of 9 · 8 prompt tokens came from the cache · ")
    html = page([trace], "x")
    assert [row[1:4] for row in table(html, "Requests, here")] == [["9", "0", "4"], ["9", "8", "4"], ["8", "7", "4"]]
    memory = embedded(html)["traces"][0]["memory"]
    cached = [
        sorted(block for block, first, after in memory["cached"] if first <= index < after)
        for index in range(len(trace.steps))
    ]
    assert cached == [sorted(step.memory.cached) for step in trace.steps if step.memory is not None]
    assert cached[:3] == [[], [], []]
    assert len(cached[5]) == len(cached[-1]) == 3, "a, b and c were the same but for their lengths"
    assert memory["num_shown"] == 8


def test_a_request_tells_its_cached_tokens_once_and_not_as_a_part_of_its_chunks(folder: Path) -> None:
    """b begins with a's first 32 tokens, and its other 12 come in chunks of 8."""
    engine = make_engine(folder, "08", block_size=16, prefill_chunk_size=8)
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    prompts = tuple(range(40)), (*range(32), *range(50, 62))
    trace = recorded(engine, [Arrival(8 * n, "ab"[n], prompt, params) for n, prompt in enumerate(prompts)])
    told = request_texts(trace)[1]
    assert list(told) == [8, 9]
    assert told[8] == "prefill of tokens 32 to 39 of 44 · 32 prompt tokens came from the cache"
    assert told[9].startswith("prefill of tokens 40 to 43 of 44 · token 1 of 1 is ")
