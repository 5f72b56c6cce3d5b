"""What a step leaves behind as a number: a lane of the page and a counter of the Chrome trace. Introduced in phase 4.

A new figure of a step, such as blocks that two requests share, is one more row of the table. Invariant: both files draw
exactly these.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.tracing.trace import Trace, TracedStep


@dataclass(frozen=True)
class Lane:
    """``value`` reads a step, ``capacity`` the most that the value can be in a trace, None where nothing bounds it."""

    name: str
    text: str
    value: Callable[[TracedStep], int]
    capacity: Callable[[Trace], int | None]


def _kv_capacity(trace: Trace) -> int | None:
    return trace.steps[0].record.kv_capacity_tokens if trace.steps else None


LANES = (
    Lane("served", "requests that the step ran", lambda step: step.num_served, lambda trace: trace.max_batch_size),
    Lane("running", "after the step", lambda step: step.record.num_running, lambda trace: trace.max_batch_size),
    Lane("waiting", "after the step", lambda step: step.record.num_waiting, lambda trace: None),
    Lane("KV tokens", "in the memory after the step", lambda step: step.record.kv_used_tokens, _kv_capacity),
)
