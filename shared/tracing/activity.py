"""What the host does in a step, when the GPU runs, and what other ranks do: the lanes of a trace. Introduced in phase
9.

The engine reads no clock. So during a step, the calls between its parts are wrapped, and each call begins or ends a
part of the step. A GPU's times come from CUDA events around the launches of a forward and of sampling; gaps between the
kernels of one forward are included, and only a profiler shows them. On a CPU a forward is computed while it is
launched, so there is only the host's lane. Other ranks (phase 12.1) record when they compute or launch a forward, using
the clock that all processes of a machine share.

Invariants: the spans of a lane do not overlap; after a step the engine's attributes are restored.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.tracing.trace import Span
from shared.tracks.ranks.channel import NUM_TIMED

Call = Callable[..., Any]
CALLS = (
    ("scheduler", "schedule", None, "schedule"),
    ("runner", "forward", "batch", "launch"),
    ("runner", "sample", None, "sample"),
    ("scheduler", "commit", "wait", None),
    ("scheduler", "finish", None, "commit"),
)
"""A part of the engine, its method, and the parts of a step that end when the method is called and when it returns.

``schedule`` chooses requests; ``batch`` builds their arrays; ``launch`` uploads them and queues the forward, or on a
CPU computes it; ``sample`` queues the draw; ``wait`` waits for the sampled tokens; ``commit`` counts them and makes
text.
"""


@dataclass
class StepActivity:
    """The activity of one step, which began at ``last_ns``, until ``step`` returns."""

    now: Callable[[], int]
    last_ns: int  # where the current part began
    host: list[Span] = field(default_factory=list)
    launches: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)  # empty on a CPU
    messages: range = range(0)  # to other ranks

    def end(self, name: str | None) -> None:
        """A part ends and the next one begins; None: neither."""
        if name is not None:
            began, self.last_ns = self.last_ns, self.now()
            self.host.append(Span(name, began, self.last_ns))


class ActivityRecorder:
    """Times the steps of ``engine``; ``now`` is the trace's clock."""

    def __init__(self, engine: Any, now: Callable[[], int]) -> None:
        self.engine = engine
        self.now = now
        group: Any = getattr(engine, "group", None)
        self.group = group if group is not None and group.size > 1 else None
        self.offset_ns = now() - time.perf_counter_ns() if self.group else 0
        self.zero: tuple[torch.cuda.Event, int] | None = None  # one moment on both clocks, the GPU's and the trace's
        if engine.model.device.type == "cuda":
            torch.cuda.synchronize()
            event = _recorded_event()
            event.synchronize()
            self.zero = event, now()

    @contextmanager
    def watch(self) -> Iterator[StepActivity]:
        """Time the step that runs in this context."""
        activity = StepActivity(self.now, 0)
        first = self.group.sender.number if self.group else 0
        with ExitStack() as undo:
            for part, method, on_call, on_return in CALLS:
                owner = getattr(self.engine, part)
                undo.callback(restore, owner, method, vars(owner).get(method))
                call = getattr(owner, method)
                if part == "runner" and self.zero is not None:
                    call = _launching(activity, method, call)
                setattr(owner, method, _timed(activity, call, on_call, on_return))
            activity.last_ns = self.now()
            yield activity
        if self.group:
            activity.messages = range(first, self.group.sender.number)

    def rank_spans(self, activity: StepActivity) -> tuple[tuple[Span, ...], ...]:
        """When each other rank computed the step's messages, if they are among the last ``NUM_TIMED``."""
        if self.group is None:
            return ()
        indices = [number % NUM_TIMED for number in activity.messages]
        times = self.group.board.times[1:, indices] + self.offset_ns  # [N - 1, messages, 2]
        return tuple(
            tuple(Span("forward", began, ended) for began, ended in of_rank if began >= activity.host[0].started_ns)
            for of_rank in times.tolist()
        )

    def gpu_spans(self, activity: StepActivity) -> tuple[Span, ...]:
        """When the GPU ran the step's launches; waits for the GPU."""
        if self.zero is None:
            return ()
        event, zero_ns = self.zero
        torch.cuda.synchronize()

        def at(other: torch.cuda.Event) -> int:
            return zero_ns + round(1e6 * event.elapsed_time(other))

        return tuple(Span(name, at(first), at(last)) for name, first, last in activity.launches)


def _timed(activity: StepActivity, call: Call, on_call: str | None, on_return: str | None) -> Call:
    def timed(*args: Any) -> Any:
        activity.end(on_call)
        result = call(*args)
        activity.end(on_return)
        return result

    return timed


def _launching(activity: StepActivity, name: str, call: Call) -> Call:
    """The call, with an event before and one after the work that it queues."""

    def launching(*args: Any) -> Any:
        first = _recorded_event()
        result = call(*args)
        activity.launches.append((name, first, _recorded_event()))
        return result

    return launching


def _recorded_event() -> torch.cuda.Event:
    """An event after everything queued so far on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def restore(owner: Any, method: str, own: Any) -> None:
    """Restore the object's method: its own or, with None, its class's."""
    if own is None:
        delattr(owner, method)
    else:
        setattr(owner, method, own)
