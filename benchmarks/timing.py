"""Timing answers: one run, token by token, and what makes runs comparable. Introduced in phase 3.

Invariant: every engine that is compared gets the same prompts, the same threads, and its turn first as often as others.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.checkpoints.progress import Progress
from shared.sampling.params import SamplingParams


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, when each came (seconds from the start), and how many the engine computed for it."""

    token_ids: list[int]
    times: list[float]
    tokens_computed: int

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed after the first token, which belongs to the prefill."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])

    @property
    def intervals(self) -> list[float]:
        """Seconds that each token after the first took."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def run(
    engine: Any,
    prompt_ids: list[int],
    new_tokens: int,
    min_decoded: int | None = None,
    max_seconds: float | None = None,
) -> Run:
    """Let an engine answer, greedily and past any end of sequence, and time every token.

    With ``max_seconds`` it breaks off once that much time went into decoding and ``min_decoded`` tokens were decoded.
    """
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    token_ids: list[int] = []
    times: list[float] = []
    computed = engine.stats()["tokens computed"]
    start = time.perf_counter()
    with closing(engine.generate(prompt_ids, params)) as outputs:
        for output in outputs:  # an id is known on the host, so a GPU has finished the step
            times.append(time.perf_counter() - start)
            token_ids.append(output.token_id)
            if max_seconds is not None and len(times) > (min_decoded or 0) and times[-1] - times[0] >= max_seconds:
                break
    return Run(token_ids, times, engine.stats()["tokens computed"] - computed)


def rotated(items: Sequence[str], turn: int) -> list[str]:
    """The items, beginning with another one each turn, so that no engine always goes first."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """PyTorch computes with so many threads inside the block; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SyntheticPrompts:
    """Draws ids uniformly from the vocabulary; the same seed gives the same prompts in the same order."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.generator = np.random.default_rng(seed)

    def draw(self, length: int) -> list[int]:
        return self.generator.integers(self.vocab_size, size=length).tolist()


class Steps:
    """Counts finished steps for a progress display."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        if self.progress:
            self.progress(text, self.done, self.total)
        yield
        self.done += 1
        if self.progress:
            self.progress(text, self.done, self.total)
