"""What a serving benchmark asks: requests and the times at which they come, as data. Introduced in phase 4.

A workload says how many requests there are, how long they are and how many are open at a time; a trace is one draw from
it. The trace is drawn once and given to every contender, so they differ in how they serve and in nothing else. Requests
come in one of two ways. Closed loop: so many are open at any time, and whenever one ends the next is sent. Poisson:
each comes at its own moment, whoever is busy then, as strangers do.

Invariant: a trace depends on the workload, the vocabulary and the seed alone; lengths and prompts are the same in
either way to come and at every rate, and a higher rate is the same arrivals, closer together.
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np

from shared.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """Requests to draw; the bounds of lengths are included, and lengths are uniform between them."""

    name: str
    title: str
    num_requests: int
    concurrency: int  # open at a time
    prompt_tokens: tuple[int, int]  # a shared prefix counts
    new_tokens: tuple[int, int]
    shared_prefix_tokens: int = 0  # with which every prompt begins

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of workload {self.name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("prompt_tokens", "new_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(
                    f"{name} of workload {self.name} lie between {low} and {high}; the first must be at least 1 and at "
                    "most the second."
                )
        if not 0 <= self.shared_prefix_tokens < self.prompt_tokens[0]:
            raise ConfigError(
                f"The shared prefix of workload {self.name} has {self.shared_prefix_tokens} tokens and its shortest "
                f"prompt {self.prompt_tokens[0]}; each prompt needs a token of its own behind the prefix."
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer together."""
        return self.prompt_tokens[1] + self.new_tokens[1]

    def describe(self) -> str:
        """Its figures in a line, for a table's head."""
        parts = [f"{self.num_requests} requests, {self.concurrency} open at a time"]
        parts.append(f"{_between(self.prompt_tokens)} tokens in, {_between(self.new_tokens)} out")
        if self.shared_prefix_tokens:
            parts.append(f"the first {self.shared_prefix_tokens} of each prompt the same")
        return ", ".join(parts)


@dataclass(frozen=True)
class TraceRequest:
    """One request; ``arrival`` is seconds after the start, None in a closed loop."""

    prompt_ids: tuple[int, ...]
    new_tokens: int
    arrival: float | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in the order they come; ``concurrency`` is None where they come by the clock."""

    requests: tuple[TraceRequest, ...]
    concurrency: int | None

    @property
    def new_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.new_tokens for request in self.requests)


def make_trace(workload: Workload, vocab_size: int, seed: int, rate: float | None = None) -> Trace:
    """Draw a trace: a closed loop, or with ``rate`` Poisson arrivals, so many a second; the first comes at once.

    Ids are drawn uniformly from the vocabulary. Raises ConfigError for a rate that is not positive.
    """
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise ConfigError(f"The rate is {rate} requests a second; it must be positive.")
    lengths, ids, clock = (np.random.default_rng([seed, zlib.crc32(workload.name.encode()), n]) for n in range(3))
    prefix = tuple(ids.integers(vocab_size, size=workload.shared_prefix_tokens).tolist())
    gaps = clock.standard_exponential(workload.num_requests)
    gaps[0] = 0.0
    arrivals = gaps.cumsum() / (rate or 1.0)
    requests = []
    for n in range(workload.num_requests):
        num_prompt = int(lengths.integers(*workload.prompt_tokens, endpoint=True))
        num_new = int(lengths.integers(*workload.new_tokens, endpoint=True))
        own = tuple(ids.integers(vocab_size, size=num_prompt - len(prefix)).tolist())
        requests.append(TraceRequest(prefix + own, num_new, None if rate is None else float(arrivals[n])))
    return Trace(tuple(requests), workload.concurrency if rate is None else None)


@dataclass(frozen=True)
class ServingSize:
    """How much a serving benchmark asks.

    ``wide_slots``, how many and of how many tokens, is the memory that all contenders of ``capacity`` have; ``trials``
    are of the comparisons in turns.
    """

    max_batch_size: int
    w1: Workload
    w2: Workload
    w3: Workload
    backlog: Workload
    tail: Workload
    together: Workload
    streams: Workload
    capacity: Workload
    wide_slots: tuple[int, int]
    trials: int

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the memory of ``capacity``."""
        num, width = self.wide_slots
        return num * width

    @property
    def workloads(self) -> dict[str, Workload]:
        """W1 to W3, by name."""
        return {workload.name: workload for workload in (self.w1, self.w2, self.w3)}

    def with_tail_requests(self, num_requests: int) -> "ServingSize":
        return replace(self, tail=replace(self.tail, num_requests=num_requests))


MIXED_PROMPTS, MIXED_ANSWERS = (32, 1024), (64, 256)
FULL = ServingSize(
    max_batch_size=16,
    w1=Workload("w1", "W1 single", 2, 1, (256, 256), (256, 256)),
    w2=Workload("w2", "W2 mixed", 32, 16, MIXED_PROMPTS, MIXED_ANSWERS),
    w3=Workload("w3", "W3 shared prefix", 32, 16, (544, 640), (32, 64), shared_prefix_tokens=512),
    backlog=Workload("backlog", "Closed loop, 64 waiting", 112, 16 + 64, MIXED_PROMPTS, MIXED_ANSWERS),
    tail=Workload("tail", "Tail", 512, 512, MIXED_PROMPTS, MIXED_ANSWERS),
    together=Workload("together", "64 at once", 64, 64, MIXED_PROMPTS, (128, 128)),
    streams=Workload("streams", "64 streams", 128, 64, (32, 256), (128, 128)),
    capacity=Workload("capacity", "Capacity", 320, 320, MIXED_PROMPTS, MIXED_ANSWERS),
    wide_slots=(20, 4096),
    trials=3,
)
LARGE = replace(FULL, max_batch_size=64, w2=replace(FULL.w2, title="W2 mixed, large", num_requests=128, concurrency=64))
"""W2 with 64 requests open at a time, and batches that hold them."""

DEMO_PROMPTS, DEMO_ANSWERS = (8, 48), (4, 24)
DEMO = ServingSize(
    max_batch_size=4,
    w1=Workload("w1", "W1 single", 2, 1, (32, 32), (16, 16)),
    w2=Workload("w2", "W2 mixed", 8, 4, DEMO_PROMPTS, DEMO_ANSWERS),
    w3=Workload("w3", "W3 shared prefix", 8, 4, (36, 48), (4, 12), shared_prefix_tokens=32),
    backlog=Workload("backlog", "Closed loop, 16 waiting", 24, 4 + 16, DEMO_PROMPTS, DEMO_ANSWERS),
    tail=Workload("tail", "Tail", 24, 24, DEMO_PROMPTS, DEMO_ANSWERS),
    together=Workload("together", "8 at once", 8, 8, DEMO_PROMPTS, (16, 16)),
    streams=Workload("streams", "8 streams", 8, 8, (8, 16), (16, 16)),
    capacity=Workload("capacity", "Capacity, a sixteenth of W2's lengths", 64, 64, (2, 64), (4, 16)),
    wide_slots=(5, 256),
    trials=3,
)
"""Without a GPU: the same measurements in a few minutes, with the demo model."""


def _between(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low} to {high}"
