"""The lanes of the page and of the Chrome trace: per-step counters, host and GPU. Introduced in phase 4.

A new counter, such as shared blocks, takes one more row in the table. The lanes of the host and the GPU came in phase
9.
Invariant: both files show exactly these lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.tracing.trace import Span, Trace, TracedStep


@dataclass(frozen=True)
class Lane:
    """``value`` reads a step; ``capacity`` is the value's upper bound in a trace; None if there is none."""

    name: str
    text: str
    value: Callable[[TracedStep], int]
    capacity: Callable[[Trace], int | None]


def _kv_capacity(trace: Trace) -> int | None:
    return trace.steps[0].record.kv_capacity_tokens if trace.steps else None


def _num_blocks(trace: Trace) -> int | None:
    memory = trace.steps[0].memory if trace.steps else None
    return memory.num_blocks if memory is not None else None


LANES = (
    Lane("served", "requests that the step ran", lambda step: step.num_served, lambda trace: trace.max_batch_size),
    Lane("running", "after the step", lambda step: step.record.num_running, lambda trace: trace.max_batch_size),
    Lane("waiting", "after the step", lambda step: step.record.num_waiting, lambda trace: None),
    Lane("KV tokens", "in the KV cache after the step", lambda step: step.record.kv_used_tokens, _kv_capacity),
    Lane(
        "KV blocks",
        "held after the step; a region is one large block",
        lambda step: step.memory.num_held if step.memory else 0,
        _num_blocks,
    ),
)


def activity_lanes(trace: Trace) -> list[tuple[str, list[tuple[Span, ...]]]]:
    """The names of the trace's lanes (``host``, on a GPU ``GPU``, and one for each rank), with their spans by step."""
    lanes = [("host", [step.host for step in trace.steps]), ("GPU", [step.gpu for step in trace.steps])]
    num_ranks = max([len(step.ranks) for step in trace.steps], default=0)
    lanes += [(f"rank {n + 1}", [step.ranks[n] for step in trace.steps]) for n in range(num_ranks)]
    return [(name, spans) for name, spans in lanes if any(spans)]
