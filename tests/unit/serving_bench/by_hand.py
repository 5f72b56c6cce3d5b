"""A small workload, and steps and requests as a run would record them."""

from typing import Any

from benchmarks.serving.run import ServedRequest, TimedStep
from benchmarks.workloads.serving import Workload
from shared.engine.record import StepRecord

MIXED = Workload("mixed", "Mixed", 40, 4, (8, 20), (3, 9))


def step(started: float, ended: float, prefilled: Any = (), **fields: Any) -> TimedStep:
    """``prefilled`` are ids, of which each has 5 tokens, or pairs of an id and its tokens."""
    blank = {"step": 0, "finished": (), "failed": (), "num_running": 0, "num_waiting": 0}
    blank |= {"decoded": (), "kv_used_tokens": 0, "kv_capacity_tokens": 100}
    entries = tuple((entry, 5) if isinstance(entry, str) else entry for entry in prefilled)
    return TimedStep(started, ended, StepRecord(**(blank | fields), prefilled=entries))


def request(arrived: float, scheduled: float | None, times: list[float], error: str | None = None) -> ServedRequest:
    return ServedRequest(arrived, 5, scheduled, times, list(range(len(times))), times[-1] if times else arrived, error)
