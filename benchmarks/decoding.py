"""Requests that decode together, timed step by step, and prompts up to their first tokens. Introduced in phase 9.1.

Invariant: no request begins or ends while steps are timed, and the engine holds none of them afterwards.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shared.sampling.params import SamplingParams

WARM = 4  # steps that are not timed


def decoding(num_tokens: int, **settings: Any) -> SamplingParams:
    """Parameters for an answer of ``num_tokens``, greedy unless ``settings`` say otherwise, ignoring end of
    sequence."""
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True} | settings)


def drain(engine: Any) -> None:
    """Step until nothing is left to do."""
    while engine.has_work():
        engine.step()


def first_token(engine: Any, prompt: list[int], *more: Any) -> float:
    """Seconds to the first token of a prompt; ``more``: further arguments of ``add_request``, after the parameters."""
    started = time.perf_counter()
    engine.add_request(prompt, decoding(1), *more)
    drain(engine)
    return time.perf_counter() - started


class Decoding:
    """Requests, given as arguments of ``add_request``, from the moment when all of them decode."""

    def __init__(self, engine: Any, requests: Sequence[tuple[Any, ...]]) -> None:
        self.engine = engine
        self.names = [engine.add_request(*request) for request in requests]
        engine.step()
        while len(engine.last_step.decoded) < len(requests):
            engine.step()

    def steps(self, number: int) -> tuple[list[float], int]:
        """Seconds of each of a number of steps, and the tokens that they produced."""
        for _ in range(WARM):
            self.engine.step()
        moments, num_tokens = [time.perf_counter()], 0
        for _ in range(number):
            num_tokens += len(self.engine.step())
            moments.append(time.perf_counter())
        return [after - before for before, after in pairwise(moments)], num_tokens

    def end(self) -> None:
        for name in self.names:
            self.engine.abort(name)
        drain(self.engine)
