"""Engines on a tiny checkpoint, requests for them, and their recording by a clock that counts."""

from pathlib import Path
from typing import Any, Self

import pytest
import torch

from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.tracing.recorder import Recorder
from shared.tracing.trace import CellKind, Trace
from shared.tracing.workload import Arrival, run

Q, P, D, S, F = CellKind.QUEUE, CellKind.PREFILL, CellKind.DECODE, CellKind.STALL, CellKind.FAILED
X, R = CellKind.PREEMPTED, CellKind.RECOMPUTE
POISON = 400
SPECULATING: dict[str, Any] = {
    "use_speculative_decoding": True,
    "drafter": "ngram",
    "spec_length": 3,
    "adapt_spec_length": False,
}


class Clock:
    """Advances by 10 ns whenever it is read, from a start that means nothing."""

    def __init__(self) -> None:
        self.now_ns = 7_000_000

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


def add_gpu(recorder: Recorder, work_ns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a recorder by ``Clock`` the events of a GPU that takes so long for each forward and each draw, in order."""
    events: list[Any] = []

    class Event:
        def __init__(self) -> None:
            before = events[-1].at_ns if events else 0
            is_end = len(events) % 2 == 1
            self.at_ns = before + work_ns if is_end else max(before, recorder.clock())
            events.append(self)

        def elapsed_time(self, other: Self) -> float:
            return (other.at_ns - self.at_ns) / 1e6

    zero = Event()
    zero.at_ns, now_ns = recorder.clock(), recorder.clock() - 10 - recorder.zero_ns
    events.clear()
    recorder.activity.zero = zero, now_ns  # type: ignore[assignment]
    monkeypatch.setattr("shared.tracing.activity._recorded_event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def make_engine(folder: Path, phase: str = "05", **settings: Any) -> Any:
    config = EngineConfig(model=str(folder), max_seq_len=128, seed=0, **settings)
    return find_lesson(phase).engine(config)


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
