"""Timing answers: one run, token by token, and what makes runs comparable. Introduced in phase 3.

Invariant: contenders that are compared get the same prompts and the same threads, and each goes first as often as the
others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shared.checkpoints.progress import Progress
from shared.sampling.params import SamplingParams

OnToken = Callable[[int], bool]
"""Called with each token when it reaches the host; False breaks the answer off."""
Answer = Callable[[list[int], int, OnToken], int]
"""Answers a prompt with so many tokens, greedily and past any end of sequence; returns how many tokens it computed."""


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, when each came (seconds from the start), and how many tokens were computed for it."""

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


def timed(
    answer: Answer, prompt_ids: list[int], new_tokens: int, min_decoded: int = 0, max_seconds: float | None = None
) -> Run:
    """Time every token of an answer, broken off after ``max_seconds`` of decoding and ``min_decoded`` tokens."""
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
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    before = engine.stats()["tokens computed"]
    with closing(engine.generate(prompt_ids, params)) as outputs:
        for output in outputs:  # an id is known on the host, so a GPU has finished the step
            if not on_token(output.token_id):
                break
    return engine.stats()["tokens computed"] - before


def run(engine: Any, prompt_ids: list[int], new_tokens: int) -> Run:
    """Time an answer of a phase's engine."""
    return timed(partial(answer_with, engine), prompt_ids, new_tokens)


def rotated(items: Sequence[str], turn: int) -> list[str]:
    """The items, beginning with another one each turn."""
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
        self.progress, self.total, self.done = progress or (lambda *_: None), total, 0

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        self.progress(text, self.done, self.total)
        yield
        self.done += 1
        self.progress(text, self.done, self.total)
