"""Per-step counters: the lanes of the page and the counters of the Chrome trace. Introduced in phase 4.

A new counter, such as shared blocks, is one more row of the table. Invariant: both files show exactly these.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.tracing.trace import Trace, TracedStep


@dataclass(frozen=True)
class Lane:
    """``value`` reads a step; ``capacity`` is the value's upper bound in a trace, None if it is unbounded."""

    name: str
    text: str
    value: Callable[[TracedStep], int]
    capacity: Callable[[Trace], int | None]


def _kv_capacity(trace: Trace) -> int | None:
    return trace.steps[0].record.kv_capacity_tokens if trace.steps else None


def _num_held(step: TracedStep) -> int:
    return step.memory.num_held if step.memory is not None else 0


def _num_blocks(trace: Trace) -> int | None:
    memory = trace.steps[0].memory if trace.steps else None
    return memory.num_blocks if memory is not None else None


LANES = (
    Lane("served", "requests that the step ran", lambda step: step.num_served, lambda trace: trace.max_batch_size),
    Lane("running", "after the step", lambda step: step.record.num_running, lambda trace: trace.max_batch_size),
    Lane("waiting", "after the step", lambda step: step.record.num_waiting, lambda trace: None),
    Lane("KV tokens", "in the KV cache after the step", lambda step: step.record.kv_used_tokens, _kv_capacity),
    Lane("KV blocks", "held after the step; a region is one large block", _num_held, _num_blocks),
)
