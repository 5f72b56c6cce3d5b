"""A small workload, and steps and requests as a run would record them."""

from typing import Any

from benchmarks.serving.run import ServedRequest, TimedStep
from benchmarks.workloads.serving import Workload
from shared.engine.record import StepRecord

MIXED = Workload("mixed", "Mixed", 40, 4, (8, 20), (3, 9))


def step(started: float, ended: float, **fields: Any) -> TimedStep:
    blank = {"step": 0, "finished": (), "failed": (), "num_running": 0, "num_waiting": 0}
    blank |= {"prefilled": (), "decoded": (), "kv_used_tokens": 0, "kv_capacity_tokens": 100}
    entries = fields.get("prefilled", ())  # ids, of which each has 5 tokens, or entries with their tokens
    fields["prefilled"] = tuple((entry, 5) if isinstance(entry, str) else entry for entry in entries)
    return TimedStep(started, ended, StepRecord(**(blank | fields)))


def request(arrived: float, scheduled: float | None, times: list[float], error: str | None = None) -> ServedRequest:
    return ServedRequest(arrived, 5, scheduled, times, list(range(len(times))), times[-1] if times else arrived, error)
