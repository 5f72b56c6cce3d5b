"""How a trace is put to an engine, and how a server's events are read."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.engine_load import BatchQueue, OneAtATime, drive
from benchmarks.serving.load_generator import read_event
from benchmarks.serving.results import figures
from benchmarks.serving.transformers_engine import TransformersEngine
from benchmarks.workloads.serving import Trace, TraceRequest, make_trace
from phases.phase_03.engine import Engine as Plain
from shared.engine.config import EngineConfig
from shared.errors import QueueFullError
from shared.server.sse import COMMENT, DONE, frame
from tests.unit.serving_bench.by_hand import MIXED


class Clockwork(BatchQueue):
    """An engine without a model: every step of a batch takes ``seconds`` and gives its number."""

    def __init__(self, max_running: int, seconds: float = 0.0, max_waiting: int = 99) -> None:
        super().__init__(self._answer, max_running)
        self.seconds, self.max_waiting, self.most_open = seconds, max_waiting, 0

    def _answer(self, prompts: Any, new_tokens: int) -> Any:
        for n in range(new_tokens):
            time.sleep(self.seconds)
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
    # Behind the first four, each comes in the moment in which another ended.
    ends = sorted(r.ended for r in run.requests)
    assert [r.arrived for r in run.requests] == [0.0] * 4 + ends[: len(run.requests) - 4]


def test_by_the_clock_a_request_waits_from_its_arrival_whatever_was_busy() -> None:
    requests = (TraceRequest((1,), 1, 0.0), TraceRequest((1,), 1, 0.005), TraceRequest((1,), 1, 0.15))
    run: Any = drive(Clockwork(max_running=1, seconds=0.05), Trace(requests, concurrency=None))
    first, second, third = run.requests
    assert [r.arrived for r in run.requests] == [0.0, 0.005, 0.15]
    assert second.scheduled >= first.ended >= 0.05
    assert third.scheduled >= 0.15
    assert len(run.steps) == 3, "it sleeps, and does not step, while nothing is there"


def test_a_refusal_is_an_error_that_frees_its_place_and_a_cut_leaves_nothing_behind() -> None:
    run = drive(Clockwork(max_running=1, max_waiting=2), Trace((TraceRequest((1,), 2),) * 6, concurrency=5))
    assert [r.error is None for r in run.requests] == [True, True, False, False, False, False]
    assert [len(r.token_ids) for r in run.finished] == [2, 2]
    engine = Clockwork(max_running=2, seconds=0.01)
    run = drive(engine, Trace((TraceRequest((1,), 1000),) * 3, concurrency=3), max_seconds=0.05)
    assert (run.is_cut, run.finished, engine.has_work(), figures(run, 2, 4)["num_errors"]) == (True, [], False, 0)
    assert 0 < run.num_tokens < 20


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
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
    assert drive(padded, trace, max_seconds=1e-9).is_cut
    assert not padded.has_work()
    again = drive(padded, trace)
    assert [r.token_ids for r in again.requests] == [r.token_ids for r in plain.requests], "the batch before is over"


def test_what_generate_raises_is_raised_by_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = TransformersEngine(EngineConfig(model=str(folder), max_seq_len=30))
    monkeypatch.setattr(padded.model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(padded, Trace((TraceRequest((5,), 3),), concurrency=1))


def test_the_servers_events_are_read() -> None:
    text = '{"text":"a: b\u2028\x85"}'  # in which Python sees ends of lines
    found = [read_event(data.removesuffix(b"\n\n")) for data in (frame(text.encode(), "token"), COMMENT, DONE)]
    assert found == [("token", text), ("", ""), ("", "[DONE]")]
