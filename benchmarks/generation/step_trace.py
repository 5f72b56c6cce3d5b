"""What runs during some decode steps: kernels, copies and launches, counted and timed. Introduced in phase 3.1.

A window counts an answer's tokens. Once it has seen ``first`` of them it lets the device finish, starts PyTorch's
profiler, and stops it ``steps`` tokens later, when the device has finished again: what it holds is the work of so many
steps. It works on whatever makes tokens one by one, an engine of ours or transformers' ``generate``.

Invariant: a kernel is what ran on the GPU and is neither a copy, a fill nor a mark of the profiler; so a CUDA graph's
kernels count one by one, and its launch as one launch of the host.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from shared.kernels.launch import LAUNCHES

COPIES = ("Memcpy", "Memset")
HOST_LAUNCH = re.compile(r"(cuda|cu)(Launch|GraphLaunch)")  # of both programming interfaces, runtime and driver
WAITS = re.compile(r"cuda(Stream|Event)Synchronize|cudaMemcpyAsync|cu(Stream|Event)Synchronize")
"""Calls in which the host does nothing but wait for the GPU; a copy to ordinary host memory is one."""
MARKS = ("ProfilerStep", "Activity Buffer", "Command Buffer", "cudaDeviceSynchronize")


@dataclass(frozen=True)
class Activity:
    """All calls of one kernel, one kind of copy, or one PyTorch operation, in the window."""

    name: str
    count: int
    microseconds: float


@dataclass(frozen=True)
class StepTrace:
    """The work of ``steps`` decode steps; activities are in order of time, the longest first.

    ``operations`` are PyTorch's, by the host's own time in them (without what they call), only where the host was
    traced. ``host_launches`` counts calls that start GPU work, ``own_launches`` those of this project's kernels.
    """

    steps: int
    seconds: float  # with the profiler's own cost in it
    kernels: tuple[Activity, ...]
    copies: tuple[Activity, ...]
    operations: tuple[Activity, ...]
    host_launches: int
    own_launches: int

    @property
    def kernel_us_per_token(self) -> float:
        return sum(kernel.microseconds for kernel in self.kernels) / self.steps

    @property
    def host_us_per_token(self) -> float:
        """The host's own work, without what it waited for the GPU."""
        busy = (call.microseconds for call in self.operations if not WAITS.match(call.name))
        return sum(busy) / self.steps


@dataclass
class TraceWindow:
    """Traces the steps of tokens ``first + 1`` to ``first + steps`` of one answer; call :meth:`token` after each token.

    Args:
        first: tokens to let pass, at least 1, so that the prefill is over.
        steps: decode steps to trace.
        device: what computes; on a CPU the host's operations are traced, there being nothing else.
        with_host: trace the host's operations beside a GPU's kernels too, at more cost to the host.
    """

    first: int
    steps: int
    device: torch.device
    with_host: bool = False
    num_tokens: int = 0
    profiler: Any = field(default=None, init=False)
    trace: StepTrace | None = field(default=None, init=False)

    def token(self) -> bool:
        """Count one token; whether the window is still open or to come."""
        self.num_tokens += 1
        if self.num_tokens == self.first:
            self._open()
        elif self.num_tokens == self.first + self.steps:
            self._close()
        return self.trace is None

    @property
    def result(self) -> StepTrace:
        """The finished trace; raises ValueError if the answer ended inside the window."""
        if self.trace is None:
            raise ValueError(f"the answer ended after {self.num_tokens} tokens, before {self.first + self.steps}")
        return self.trace

    def _open(self) -> None:
        self.profiler = profile(activities=activities(self.device, self.with_host))
        _finish(self.device)
        self.profiler.start()
        self.launched = sum(LAUNCHES.values())
        self.started = time.perf_counter()

    def _close(self) -> None:
        _finish(self.device)
        seconds = time.perf_counter() - self.started  # up to here, so that the profiler's end is not in it
        self.profiler.stop()
        launched = sum(LAUNCHES.values()) - self.launched
        self.trace = read_events(self.profiler.events(), self.steps, seconds, launched)


def activities(device: torch.device, with_host: bool) -> list[ProfilerActivity]:
    """What the profiler records: a CPU's operations, a GPU's kernels, or both."""
    if device.type != "cuda":
        return [ProfilerActivity.CPU]
    return [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if with_host else [])]


def prepare_profiler(device: torch.device) -> None:
    """Start and stop the profiler once, so that its loading falls into no window."""
    with profile(activities=activities(device, with_host=True)):
        torch.ones(1, device=device).add_(1)
        _finish(device)


def read_events(events: Iterable[Any], steps: int, seconds: float, own_launches: int) -> StepTrace:
    """Sort the profiler's events (``FunctionEvent`` of torch.autograd.profiler_util) into a trace."""
    kernels: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    times: dict[str, float] = {}
    host_launches = 0
    for event in events:
        if getattr(event, "is_user_annotation", False) or event.name.startswith(MARKS):
            continue
        if event.device_type == DeviceType.CUDA:
            kind = copies if event.name.startswith(COPIES) else kernels
            microseconds = event.time_range.elapsed_us()
        elif event.device_type == DeviceType.CPU:
            host_launches += HOST_LAUNCH.match(event.name) is not None
            kind, microseconds = operations, event.self_cpu_time_total
        else:
            continue
        kind[event.name] += 1
        times[event.name] = times.get(event.name, 0.0) + microseconds

    def ordered(kind: Counter[str]) -> tuple[Activity, ...]:
        found = (Activity(name, count, times[name]) for name, count in kind.items())
        return tuple(sorted(found, key=lambda activity: -activity.microseconds))

    return StepTrace(
        steps, seconds, ordered(kernels), ordered(copies), ordered(operations), host_launches, own_launches
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
