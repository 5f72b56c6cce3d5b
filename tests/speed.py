"""What the speed tests share: a benchmark of every phase, requests served and counted, and engines timed in turns.

A test that compares seconds is marked ``measured``. It compares two contenders in one process, in turns, by medians.
Next to it is a test without the mark, which asserts the count that explains the ratio: forwards, tokens, steps.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.timing import in_turns, run
from shared.engine.record import StepRecord
from tests import mixed_requests
from tests.mixed_requests import GREEDY, Requests, tokens

R = TypeVar("R")
ONE_ANSWER = "decode 16 tokens after 32, tiny model"
"""The group of `time_one_answer`, in whose table pytest-benchmark shows the phases side by side."""


def one_answer(engine: Any) -> list[int]:
    """16 greedy tokens after a prompt of 32."""
    return run(engine, [7] * 32, new_tokens=16).token_ids


def time_one_answer(benchmark: Any, engine: Any) -> None:
    benchmark.pedantic(one_answer, args=(engine,), rounds=5, warmup_rounds=1)


@dataclass(frozen=True)
class Served:
    """What an engine did for some requests, and how long it took."""

    seconds: float
    answers: list[list[int | None]]
    records: list[StepRecord]
    num_forwards: int
    num_tokens_computed: int

    @property
    def num_steps(self) -> int:
        return len(self.records)

    @property
    def batch_sizes(self) -> list[int]:
        """The requests of each step."""
        return [len(record.prefilled) + len(record.decoded) for record in self.records]

    @property
    def waits(self) -> list[int]:
        """The number of steps before each prompt's, in the order in which prompts were computed."""
        return [step for step, record in enumerate(self.records) for _ in record.prefilled]

    @property
    def num_preemptions(self) -> int:
        return sum(len(record.preempted) for record in self.records)


def serve(engine: Any, prompts: Sequence[list[int]], new_tokens: int | Sequence[int]) -> Served:
    """Let requests that arrive together have so many greedy tokens each."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    requests: Requests = [
        (prompt, GREEDY | {"max_new_tokens": count}) for prompt, count in zip(prompts, counts, strict=True)
    ]
    num_forwards, num_computed = engine.runner.num_forwards, engine.runner.num_tokens_computed
    started = time.perf_counter()
    answers, records = mixed_requests.serve(engine, requests)
    seconds = time.perf_counter() - started
    assert [len(answer) for answer in answers] == [*counts], "each request has its whole answer"
    return Served(
        seconds,
        [tokens(answer) for answer in answers],
        records,
        engine.runner.num_forwards - num_forwards,
        engine.runner.num_tokens_computed - num_computed,
    )


def counted_calls(run: Callable[[], R], calls: Counter[str]) -> R:
    """Run it, and add to ``calls`` how many functions it calls: of Python ("call"), and built in ("c_call")."""
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        return run()
    finally:
        sys.setprofile(None)


def seconds_a_token(engine: Any, num_prompt: int = 32, num_new: int = 16) -> float:
    """The median time of a token after the first, of one request alone."""
    return statistics.median(run(engine, [7] * num_prompt, num_new).intervals)


def speedup(slow: Callable[[], float], fast: Callable[[], float], trials: int = 3) -> float:
    """How many times as long ``slow`` takes as ``fast``: the ratio of the medians of the seconds that they return.

    Both run once before, and then in turns, so that a busy machine slows both.
    """
    seconds = in_turns({"slow": slow, "fast": fast}, trials, warm_ups=1)
    print({name: [f"{1000 * value:.2f} ms" for value in found] for name, found in seconds.items()})
    return statistics.median(seconds["slow"]) / statistics.median(seconds["fast"])
