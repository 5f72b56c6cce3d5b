"""The time of one call whose inputs are not in the cache. Introduced in phase 3.1.

A decode step reads every weight once and comes back to it a token later, when the cache has long held others. A loop
over one set of inputs would measure the cache, so the inputs are many sets, called in turn, which together are several
times the cache. And a kernel of a few microseconds ends before Python can ask for the next, so on a GPU all calls are
captured in one CUDA graph and its replays are timed, between events. On a CPU the same sets pass in a plain loop.

Invariant: whatever is compared is timed here, over the same sets, so that a peer never has a warmer cache or cheaper
launches.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CACHES_ROTATED = 4
"""All sets of inputs together are at least so many times the last cache."""
MOST_INPUT_SETS = 4096
"""Sets at most, even if together they are less. So many are needed only where a set is some kilobytes, which in a
decode step too lie in the cache: the kernel before has just written them."""
DEMO_CACHE_BYTES = 1 << 14
"""What stands for a CPU's last cache at demo size, where the figures show the way and not the machine."""
MIN_CALLS = 128
"""Calls in a graph at least: a launch of a graph costs some microseconds, which so many share."""
MIN_CALLS_CPU = 16
TRIALS = 9
LONGEST_SECONDS = 1.5
"""All trials together; a graph that would take longer is replayed less often, but ``LEAST_TRIALS`` times."""
LEAST_TRIALS = 3
WARM_UPS = 2
ALIGNMENT = 128  # bytes: a cache line, and more than any kernel's alignment

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Timing:
    """Seconds a call took, one number for each trial."""

    trials: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.trials)

    @property
    def spread(self) -> float:
        """Longest less shortest trial, as a share of the median: differences below it are noise."""
        return (max(self.trials) - min(self.trials)) / self.seconds


def cache_bytes(device: torch.device) -> int:
    """Size of the device's last cache: a GPU's L2; a small stand-in for a CPU's."""
    if device.type != "cuda":
        return DEMO_CACHE_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def num_input_sets(set_bytes: int, cache_bytes: int) -> int:
    """How many sets of inputs of ``set_bytes`` each have to be called in turn: from two to ``MOST_INPUT_SETS``."""
    return min(MOST_INPUT_SETS, max(2, -(-CACHES_ROTATED * cache_bytes // set_bytes)))


def rotated_tensors(
    num_sets: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Callable[[torch.Tensor], Any]
) -> list[torch.Tensor]:
    """One contiguous tensor a set; no two share a cache line, and all are aligned alike.

    Args:
        fill: given ``[num_sets, numbers]``, writes all of it.
    """
    numbers = torch.Size(shape).numel()
    line = ALIGNMENT // dtype.itemsize
    rows = torch.empty(num_sets, -(-numbers // line) * line, dtype=dtype, device=device)[:, :numbers]
    fill(rows)
    return [row.view(shape) for row in rows.unbind(0)]


def time_calls(
    call: Callable[..., Any], input_sets: Sequence[Inputs], *, trials: int = TRIALS, min_calls: int | None = None
) -> Timing:
    """Time ``call(*inputs)`` over the sets in turn, all of them equally often.

    A trial has at least ``min_calls`` calls; None: ``MIN_CALLS`` on a GPU, ``MIN_CALLS_CPU`` elsewhere.
    The device is that of the first tensor of the first set. What is called has been warmed up before it is captured, so
    kernels are compiled by then.
    """
    device = next(value.device for value in input_sets[0] if isinstance(value, torch.Tensor))
    if min_calls is None:
        min_calls = MIN_CALLS if device.type == "cuda" else MIN_CALLS_CPU
    rounds = -(-min_calls // len(input_sets))
    with torch.no_grad():
        if device.type == "cuda":
            return _time_graph(call, input_sets, rounds, trials, device)
        return _time_loop(call, input_sets, rounds, trials)


def _time_graph(
    call: Callable[..., Any], input_sets: Sequence[Inputs], rounds: int, trials: int, device: torch.device
) -> Timing:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            for inputs in (input_sets[0], input_sets[-1]):
                call(*inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as a compiler's, may allocate meanwhile: only this one's calls must be capturable.
    before = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(rounds):
                for inputs in input_sets:
                    call(*inputs)
    finally:
        torch.cuda.set_stream(before)  # which a capture that failed does not give back
    once = min(_replay(graph, WARM_UPS, device))
    times = _replay(graph, min(trials, max(LEAST_TRIALS, int(LONGEST_SECONDS / once))), device)
    return Timing(tuple(seconds / (rounds * len(input_sets)) for seconds in times))


def _replay(graph: torch.cuda.CUDAGraph, times: int, device: torch.device) -> list[float]:
    """Seconds of each replay, asked for one behind the other so that the device never waits for the host."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _time_loop(call: Callable[..., Any], input_sets: Sequence[Inputs], rounds: int, trials: int) -> Timing:
    call(*input_sets[0])
    times = []
    for _ in range(trials):
        started = time.perf_counter()
        for _ in range(rounds):
            for inputs in input_sets:
                call(*inputs)
        times.append((time.perf_counter() - started) / (rounds * len(input_sets)))
    return Timing(tuple(times))
