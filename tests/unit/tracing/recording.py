"""Engines on a tiny checkpoint, requests for them, and their recording by a clock that counts."""

from pathlib import Path
from typing import Any

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
