"""How a trace is put to an engine, and how requests and events go to and from a server."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.engine_load import OneAtATime, drive
from benchmarks.serving.load_generator import EventReader
from benchmarks.serving.results import figures, slot_utilisation
from benchmarks.serving.transformers_engine import TransformersEngine
from benchmarks.workloads.serving import Trace, TraceRequest, make_trace
from phases.phase_03.engine import Engine as Plain
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.errors import QueueFullError
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason
from tests.unit.serving_bench.by_hand import MIXED, step


class Clockwork:
    """An engine without a model: a step takes ``seconds`` and gives each running request its place in the answer."""

    def __init__(self, max_running: int, seconds: float = 0.0, max_waiting: int = 99) -> None:
        self.max_running, self.seconds, self.max_waiting = max_running, seconds, max_waiting
        self.waiting: list[tuple[str, int]] = []
        self.running: dict[str, list[int]] = {}
        self.most_open = self.num_forwards = 0
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

    def stats(self) -> dict[str, int]:
        return {"forward passes": self.num_forwards}


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

    queue: Any = OneAtATime(SimpleNamespace(generate=generate, stats=lambda: {"tokens computed": 7}))
    trace = Trace((TraceRequest((10,), 3), TraceRequest((20,), 1), TraceRequest((30,), 2)), concurrency=3)
    run = drive(queue, trace)
    assert [r.token_ids for r in run.requests] == [[10, 11, 12], [20], [30, 31]]
    assert [s.record.prefilled for s in run.steps if s.record.prefilled] == [(("0", 1),), (("1", 1),), (("2", 1),)]
    assert run.num_forwards == 6
    assert slot_utilisation(run.steps, 1) == 1
    assert [s.record.num_waiting for s in run.steps] == [2, 2, 2, 1, 0, 0]
    assert queue.stats() == {"tokens computed": 7, "forward passes": 6}
    for name in "ab":
        queue.add_request((1,), SamplingParams(temperature=0.0, max_new_tokens=2), name)
    queue.step()
    assert queue.abort("a")
    assert queue.abort("b")
    assert not queue.abort("b")
    assert not queue.has_work()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_transformers_gives_the_plain_loops_tokens(tiny_checkpoints: dict[str, Path], family: str) -> None:
    """In batches of three, of prompts of 3 to 40 tokens, more than Gemma's window, and answers of 1 to 9."""
    config = EngineConfig(model=str(tiny_checkpoints[family]), max_seq_len=64)
    rows = make_trace(replace(MIXED, num_requests=5, prompt_tokens=(40, 40)), 300, seed=0).requests
    lengths = [(40, 9), (3, 1), (17, 5), (8, 4), (25, 8)]
    requests = [TraceRequest(row.prompt_ids[:n], new) for row, (n, new) in zip(rows, lengths, strict=True)]
    trace = Trace(tuple(requests), concurrency=5)
    padded = TransformersEngine(replace(config, max_batch_size=3))
    plain = drive(OneAtATime(Plain(config)), trace)
    run = drive(padded, trace)
    assert [r.token_ids for r in run.requests] == [r.token_ids for r in plain.requests]
    # Three rows of the longest prompt and of the longest answer's decoding; then two.
    assert padded.num_tokens_computed == 3 * (40 + 8) + 2 * (25 + 7)
    assert run.num_forwards == 9 + 8
    assert [len(step.record.decoded) for step in run.steps][1:9] == [2, 2, 2, 2, 1, 1, 1, 1]
    cut = drive(padded, trace, max_seconds=1e-9)
    assert cut.is_cut
    assert not padded.has_work()
    again = drive(padded, trace)
    assert [r.token_ids for r in again.requests] == [r.token_ids for r in plain.requests], "the batch before is over"


def test_what_generate_raises_is_raised_by_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = TransformersEngine(EngineConfig(model=str(folder), max_seq_len=30))

    def generate(**_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(padded.model, "generate", generate)
    with pytest.raises(RuntimeError, match="out of memory"):
        drive(padded, Trace((TraceRequest((5,), 3),), concurrency=1))


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=6), st.data())
def test_events_are_read_however_the_bytes_arrive(texts: list[str], data: st.DataObject) -> None:
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(f": still here\n\nevent: token\ndata: [{text}]\n\n" for text in texts) + "data: [DONE]\n\n"
    raw = stream.replace("\n", end).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, events = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        events += reader.feed(raw[start:end])
    assert events == [("token", f"[{text}]") for text in texts] + [(None, "[DONE]")]
    assert reader.rest == b""
