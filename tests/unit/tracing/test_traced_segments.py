"""A trace of requests that are made of segments: a row for each segment that is computed, and what was found."""

from pathlib import Path

from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import page
from shared.tracing.trace import CellKind, Outcome
from shared.tracing.workload import Arrival, run
from tests.unit.tracing.written import embedded

A, B = (5, 6, 7, 8), (9, 10, 11)
TWO = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)


def test_each_segment_is_computed_in_a_row_of_its_own_before_the_requests_that_use_it(folder: Path) -> None:
    for overlaps in (False, True):
        settings = {"max_batch_size": 4, "max_seq_len": 64, "prefill_chunk_size": 3, "overlap_scheduling": overlaps}
        recorder = Recorder(find_lesson("09.1").engine(EngineConfig(model=str(folder), **settings)))
        arrivals = [Arrival(0, "a", (1, 2), TWO, None, (A, B)), Arrival(9, "b", (3,), TWO, None, (B, A))]
        run(recorder, arrivals)
        trace = recorder.trace("segments")
        rows = {request.request_id: request for request in trace.requests}
        segments = [request for name, request in rows.items() if name.startswith("segment ")]
        assert sorted(segment.num_prompt_tokens for segment in segments) == [3, 4], "each once"
        for segment in segments:
            assert (segment.outcome, segment.tokens) == (Outcome.FINISHED, ())
            assert trace.cells(segment)[0].kind is CellKind.PREFILL
            assert sum(num_tokens for *_, num_tokens in trace.chunks(segment)) == segment.num_prompt_tokens
            assert segment.end_step <= trace.chunks(rows["a"])[0][0] + 1
        for name, own in (("a", 2), ("b", 1)):
            assert (rows[name].num_prompt_tokens, rows[name].num_cached_tokens) == (7 + own, 7)
            assert [part[1:] for part in trace.chunks(rows[name])] == [(7, own)]
        assert segments[0].request_id in page([trace], "segments")
        assert embedded(page([trace], "segments"))


def test_a_segment_that_was_evicted_has_another_row(folder: Path) -> None:
    engine = find_lesson("09.1").engine(EngineConfig(model=str(folder), max_batch_size=4, max_seq_len=64))
    recorder = Recorder(engine)
    for name in ("a", "b"):
        recorder.add_request([1], TWO, name, segments=[A])
        while engine.has_work():
            recorder.step()
        engine.pool.drop_cached()
    ids = [request.request_id for request in recorder.trace("again").requests]
    assert len(ids) == 4
    assert len(set(ids)) == 3
    engine.register(A)
    taken = next(name for name in ids if name not in ("a", "b"))
    for name in (taken, f"{taken}+"):
        recorder.add_request([1], TWO, name)
    recorder.step()
    running = {request.request_id: request for request in recorder.trace("taken ids").requests}
    assert running[taken].end_step is None, "a client's request ends with its last token"
    while engine.has_work():
        recorder.step()
    rows = {request.request_id: request for request in recorder.trace("taken ids").requests}
    assert rows[f"{taken}++"].num_prompt_tokens == len(A)
