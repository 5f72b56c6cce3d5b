"""Timing: answers token by token, calls whose inputs are not in the cache, and what makes them comparable.

Introduced in phase 3; the calls in phase 3.1. The inputs of a call are many sets, used in turn, which together are
several times as large as the cache; on a GPU all calls are captured in one CUDA graph. Invariant: compared contenders
get the same prompts or inputs and the same threads, and go first equally often.
"""

import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.decoding import decoding
from shared.checkpoints.progress import Progress

OnToken = Callable[[int], bool]
"""Called with each token when it reaches the host; returning False cuts the answer short."""
Answer = Callable[[list[int], int, OnToken], int]
"""Answers a prompt with the given number of tokens, greedily and past any end of sequence; returns how many tokens it
computed."""

CACHES_ROTATED = 4  # all sets of inputs together are at least this many times the last cache
MOST_INPUT_SETS = 4096
"""Maximum number of sets, even if together they are smaller. This many are needed only if a set has a few kilobytes; in
a decode step these are in the cache too, since the previous kernel has just written them."""
DEMO_CACHE_BYTES = 1 << 14  # a stand-in for a CPU's last cache, where figures only demonstrate the method
DEMO_TRIALS = 3
GRAPH_MS = 20
"""Milliseconds of launches in a graph, which has at least one call for every set: a few thousand calls at most."""
ALIGNMENT = 128  # bytes: a cache line, and more than any kernel's alignment

Inputs = tuple[Any, ...]
Name = TypeVar("Name")


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, when each arrived (seconds from the start), and the number of tokens computed for it."""

    token_ids: list[int]
    times: list[float]
    tokens_computed: int

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed after the first token, which belongs to the prefill."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])

    @property
    def intervals(self) -> list[float]:
        """Seconds taken by each token after the first."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def timed(
    answer: Answer, prompt_ids: list[int], new_tokens: int, min_decoded: int = 0, max_seconds: float | None = None
) -> Run:
    """Time every token of an answer, cut short after ``max_seconds`` of decoding and ``min_decoded`` tokens."""
    token_ids, times = [], []
    start = time.perf_counter()

    def on_token(token_id: int) -> bool:
        times.append(time.perf_counter() - start)
        token_ids.append(token_id)
        return max_seconds is None or len(times) <= min_decoded or times[-1] - times[0] < max_seconds

    tokens_computed = answer(prompt_ids, new_tokens, on_token)
    return Run(token_ids, times, tokens_computed)


def answer_with(engine: Any, prompt_ids: list[int], new_tokens: int, on_token: OnToken) -> int:
    """Let a phase's engine answer: an `Answer` once the engine is bound."""
    before = engine.stats()["tokens computed"]
    with closing(engine.generate(prompt_ids, decoding(new_tokens))) as outputs:
        for output in outputs:  # an id is known on the host, so a GPU has finished the step
            if not on_token(output.token_id):
                break
    return engine.stats()["tokens computed"] - before


def run(engine: Any, prompt_ids: list[int], new_tokens: int) -> Run:
    """Time an answer of a phase's engine."""
    return timed(partial(answer_with, engine), prompt_ids, new_tokens)


def rotated(items: Sequence[str], turn: int) -> list[str]:
    """The items, with each turn beginning with a different one."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def in_turns(calls: Mapping[Name, Callable[[], float]], trials: int, warm_ups: int = 0) -> dict[Name, list[float]]:
    """What each call returns, by trial; the calls are interleaved, every second time in reverse."""
    found: dict[Name, list[float]] = {name: [] for name in calls}
    for trial in range(-warm_ups, trials):
        for name in calls if trial % 2 else reversed(list(calls)):
            value = calls[name]()
            found[name] += [value] if trial >= 0 else []
    return found


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """PyTorch computes with this many threads inside the block; None leaves the number unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SyntheticPrompts:
    """Samples ids uniformly from the vocabulary; the same seed gives the same prompts in the same order."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.generator = np.random.default_rng(seed)

    def draw(self, length: int) -> list[int]:
        return self.generator.integers(self.vocab_size, size=length).tolist()


class Steps:
    """Counts finished steps for a progress display; ``total`` stays as it is."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress or (lambda *_: None), total, 0

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        self.progress(text, self.done, self.total)
        yield
        self.done += 1
        self.progress(text, self.done, self.total)

    @contextmanager
    def part(self, size: int) -> Iterator[None]:
        """A part of the run that counts as ``size`` steps when it is over, also if it needed fewer."""
        end = self.done + size
        yield
        self.done = end


def cache_bytes(device: torch.device) -> int:
    """Size of the device's last cache: a GPU's L2; a small stand-in for a CPU's."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).L2_cache_size if is_gpu else DEMO_CACHE_BYTES


def num_input_sets(set_bytes: int, cache_bytes: int) -> int:
    """How many sets of inputs of ``set_bytes`` each are used in turn: from two to ``MOST_INPUT_SETS``."""
    return min(MOST_INPUT_SETS, max(2, -(-CACHES_ROTATED * cache_bytes // set_bytes)))


def rotated_tensors(
    num_sets: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Callable[[torch.Tensor], Any]
) -> list[torch.Tensor]:
    """One contiguous tensor per set, equally aligned, no two in one cache line; ``fill`` writes all ``[sets,
    numbers]``."""
    numbers = torch.Size(shape).numel()
    line = ALIGNMENT // dtype.itemsize
    rows = torch.empty(num_sets, -(-numbers // line) * line, dtype=dtype, device=device)[:, :numbers]
    fill(rows)
    return [row.view(shape) for row in rows.unbind(0)]


def time_calls(call: Callable[..., Any], input_sets: Sequence[Inputs], *, is_eager: bool = False) -> float:
    """Seconds of ``call(*inputs)``, the median of trials over all sets in turn, on the device of the first tensor; all
    sets are called before the first trial. ``is_eager``: launched by Python even on a GPU, host and stream together.
    """
    device = next(value.device for value in input_sets[0] if isinstance(value, torch.Tensor))

    def all_sets() -> None:
        for inputs in input_sets:
            call(*inputs)
        if is_eager and device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        if device.type == "cuda" and not is_eager:
            from triton.testing import do_bench_cudagraph

            torch.cuda.synchronize(device)  # the inputs were generated on a stream other than the captured one
            replays = do_bench_cudagraph(all_sets, rep=GRAPH_MS, return_mode="all")
            trials = [milliseconds / 1e3 for milliseconds in replays[1:]]  # the first replay uploads the graph
        else:
            all_sets()
            trials = timeit.repeat(all_sets, number=1, repeat=DEMO_TRIALS)
    return statistics.median(trials) / len(input_sets)
