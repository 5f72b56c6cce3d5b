"""The time of one call whose inputs are not in the cache. Introduced in phase 3.1.

A decode step reads every weight once and comes back to it a token later, when the cache has long held others. A loop
over one set of inputs would measure the cache, so the inputs are many sets, called in turn, which together are several
times the cache. A kernel of a few microseconds ends before Python can launch the next, so on a GPU Triton's
``do_bench_cudagraph`` captures all calls in one CUDA graph and times its replays between events. On a CPU the same sets
pass in a plain loop.

Invariant: whatever is compared is timed here, over the same sets, so that a peer never has a warmer cache or cheaper
launches.
"""

import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch

CACHES_ROTATED = 4  # all sets of inputs together are at least so many times the last cache
MOST_INPUT_SETS = 4096
"""Sets at most, even if together they are less. So many are needed only where a set is some kilobytes, which in a
decode step too lie in the cache: the kernel before has just written them."""
DEMO_CACHE_BYTES = 1 << 14  # stands for a CPU's last cache, where the figures show the way and not the machine
DEMO_TRIALS = 3
GRAPH_MS = 20
"""Milliseconds of launches that a graph holds, and at least one call of every set: some thousands of calls at most."""
ALIGNMENT = 128  # bytes: a cache line, and more than any kernel's alignment

Inputs = tuple[Any, ...]


def cache_bytes(device: torch.device) -> int:
    """Size of the device's last cache: a GPU's L2; a small stand-in for a CPU's."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).L2_cache_size if is_gpu else DEMO_CACHE_BYTES


def num_input_sets(set_bytes: int, cache_bytes: int) -> int:
    """How many sets of inputs of ``set_bytes`` each have to be called in turn: from two to ``MOST_INPUT_SETS``."""
    return min(MOST_INPUT_SETS, max(2, -(-CACHES_ROTATED * cache_bytes // set_bytes)))


def rotated_tensors(
    num_sets: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Callable[[torch.Tensor], Any]
) -> list[torch.Tensor]:
    """One contiguous tensor a set, aligned alike, no two in a cache line; ``fill`` writes all ``[sets, numbers]``."""
    numbers = torch.Size(shape).numel()
    line = ALIGNMENT // dtype.itemsize
    rows = torch.empty(num_sets, -(-numbers // line) * line, dtype=dtype, device=device)[:, :numbers]
    fill(rows)
    return [row.view(shape) for row in rows.unbind(0)]


def time_calls(call: Callable[..., Any], input_sets: Sequence[Inputs]) -> float:
    """Seconds of ``call(*inputs)``, the median of trials over all sets in turn, on the device of the first tensor.

    All sets are called before the first trial, so kernels are compiled by then. Raises what ``call`` raises, and
    RuntimeError where it cannot be captured.
    """
    device = next(value.device for value in input_sets[0] if isinstance(value, torch.Tensor))

    def all_sets() -> None:
        for inputs in input_sets:
            call(*inputs)

    with torch.no_grad():
        if device.type == "cuda":
            from triton.testing import do_bench_cudagraph

            torch.cuda.synchronize(device)  # the inputs were drawn on another stream than the one that is captured
            replays = do_bench_cudagraph(all_sets, rep=GRAPH_MS, return_mode="all")
            trials = [milliseconds / 1e3 for milliseconds in replays[1:]]  # the first replay uploads the graph
        else:
            all_sets()
            trials = timeit.repeat(all_sets, number=1, repeat=DEMO_TRIALS)
    return statistics.median(trials) / len(input_sets)
