"""Workloads of the serving benchmarks: requests and their arrival times, as data. Introduced in phase 4.

A trace is one random sample of a workload. Requests arrive in a closed loop, where a fixed number is open and the next
one is sent whenever one ends, or as Poisson arrivals, each at its own time. Invariant: a trace depends only on the
workload, the vocabulary and the seed; a higher rate gives the same arrivals, closer together.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """Requests to sample; lengths are uniform between their bounds, inclusive."""

    name: str
    title: str
    num_requests: int
    concurrency: int  # requests open at a time
    prompt_tokens: tuple[int, int]  # including a shared prefix
    new_tokens: tuple[int, int]
    shared_prefix_tokens: int = 0  # every prompt begins with it
    beside: "Workload | None" = None  # its requests arrive first and decode until the others have ended
    turns: int = 1  # turns for each request, which is then a conversation
    turn_tokens: tuple[int, int] = (0, 0)  # tokens that a further turn adds to the prompt and answer before it
    temperature: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and the longest answer together."""
        further = (self.turns - 1) * (self.turn_tokens[1] + self.new_tokens[1])
        return self.prompt_tokens[1] + self.new_tokens[1] + further

    def describe(self) -> str:
        """Its figures in one line, for the heading of a table."""
        bounds = self.prompt_tokens, self.new_tokens
        prompts, answers = (str(low) if low == high else f"{low} to {high}" for low, high in bounds)
        text = f"{self.num_requests} requests, {self.concurrency} open at a time, {prompts} tokens in, {answers} out"
        if self.shared_prefix_tokens:
            text += f", the first {self.shared_prefix_tokens} of each prompt the same"
        if self.temperature:
            text += f", drawn at temperature {self.temperature:g}"
        if self.turns > 1:
            low, high = self.turn_tokens
            text += f", {self.turns} turns each, of which a further one adds {low} to {high} tokens"
        if self.beside:
            text += f"; beside them {self.beside.num_requests} decode, and times between tokens are of those"
        return text


@dataclass(frozen=True)
class TraceRequest:
    """One request; ``arrival`` is seconds after the start, None in a closed loop. A background request is aborted once
    all others have ended. ``turns`` are the later turns of its conversation, each with the tokens that it adds.
    """

    prompt_ids: tuple[int, ...]
    new_tokens: int
    arrival: float | None = None
    is_background: bool = False
    turns: tuple["TraceRequest", ...] = ()

    def next_turn(self, answer: Sequence[int]) -> "TraceRequest":
        """The first of the turns that follow, with everything before it as the beginning of its prompt."""
        first, *turns = self.turns
        return replace(first, prompt_ids=(*self.prompt_ids, *answer, *first.prompt_ids), turns=tuple(turns))


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; ``concurrency`` is None if they arrive at given times."""

    requests: tuple[TraceRequest, ...]
    concurrency: int | None
    temperature: float = 0.0

    @property
    def new_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(turn.new_tokens for request in self.requests for turn in (request, *request.turns))


def make_trace(workload: Workload, vocab_size: int, seed: int, rate: float | None = None) -> Trace:
    """Sample a trace of uniform ids: a closed loop or, with ``rate``, Poisson arrivals, that many per second, the first
    immediately.
    """
    lengths, ids, clock = (np.random.default_rng([seed, zlib.crc32(workload.name.encode()), n]) for n in range(3))
    prefix = tuple(ids.integers(vocab_size, size=workload.shared_prefix_tokens).tolist())
    gaps = clock.standard_exponential(workload.num_requests)
    gaps[0] = 0.0
    arrivals = gaps.cumsum() / (rate or 1.0)
    first = None if rate is None else 0.0
    requests = [
        replace(each, new_tokens=workload.longest - len(each.prompt_ids), arrival=first, is_background=True)
        for each in (make_trace(workload.beside, vocab_size, seed).requests if workload.beside else ())
    ]

    def draw(bounds: tuple[int, int], prefix: tuple[int, ...] = ()) -> TraceRequest:
        num_prompt = int(lengths.integers(*bounds, endpoint=True))
        num_new = int(lengths.integers(*workload.new_tokens, endpoint=True))
        return TraceRequest(prefix + tuple(ids.integers(vocab_size, size=num_prompt - len(prefix)).tolist()), num_new)

    for n in range(workload.num_requests):
        begun = draw(workload.prompt_tokens, prefix)
        turns = tuple(draw(workload.turn_tokens) for _ in range(workload.turns - 1))
        requests.append(replace(begun, arrival=None if rate is None else float(arrivals[n]), turns=turns))
    return Trace(tuple(requests), workload.concurrency if rate is None else None, workload.temperature)


@dataclass(frozen=True)
class ServingSize:
    """The size of a serving benchmark.

    ``wide_slots``, their number and tokens, is the KV cache of each contender of ``capacity``; both the regions of the
    trace's longest request and the blocks must divide it. ``trials``: the number of trials of the interleaved
    comparisons. Long prompts are computed in chunks of ``chunk`` tokens and, for the curve, in chunks of each of
    ``chunk_sizes``.
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
    decode: Workload
    long_prompts: Workload
    chunk: int
    chunk_sizes: tuple[int, ...]
    w4: Workload
    one_prefix: Workload
    conversation: Workload
    agents: Workload
    decode_one: Workload
    decode_few: Workload
    decode_tens: Workload
    decode_most: Workload
    sampled: Workload
    trials: int

    @property
    def one_prompt(self) -> Workload:
        """Long prompts one after the other."""
        title, beside = f"{self.long_prompts.title}, one after the other", self.decode.num_requests
        return replace(self.long_prompts, title=title, num_requests=4, concurrency=beside + 1)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the KV cache of ``capacity``."""
        return self.wide_slots[0] * self.wide_slots[1]

    @property
    def capacity_batch(self) -> int:
        """A batch size that blocks of that memory never reach: twice as many requests as would fit with their whole
        lengths."""
        mean = (sum(self.capacity.prompt_tokens) + sum(self.capacity.new_tokens)) / 2
        return min(self.capacity.num_requests, int(2 * self.capacity_tokens / mean))

    @property
    def sampled_blocks(self) -> int:
        """The maximum number of blocks that the requests of ``sampled`` fill: some end before others are long."""
        mean = (sum(self.sampled.prompt_tokens) + sum(self.sampled.new_tokens)) / 2
        return int(0.75 * self.sampled.concurrency * mean) // BLOCK_SIZE

    @property
    def server_batch(self) -> int:
        """The batch size of the server: it holds the streams of every experiment that goes over HTTP."""
        return max(self.max_batch_size, self.streams.concurrency)


def decoding(name: str, batch: int, num_tokens: int) -> Workload:
    """This many requests at once, with as many input tokens as output tokens."""
    return Workload(name, f"{batch} decode", batch, batch, (num_tokens, num_tokens), (num_tokens, num_tokens))


MIXED_PROMPTS, MIXED_ANSWERS = (32, 1024), (64, 256)
DECODE_32 = Workload("decode", "32 decode", 32, 32, (64, 64), (256, 256))
FULL = ServingSize(
    max_batch_size=16,
    w1=Workload("w1", "W1 single", 2, 1, (256, 256), (256, 256)),
    w2=Workload("w2", "W2 mixed", 32, 16, MIXED_PROMPTS, MIXED_ANSWERS),
    w3=Workload("w3", "W3 shared prefix", 32, 16, (544, 640), (32, 64), shared_prefix_tokens=512),
    backlog=Workload("backlog", "Closed loop, 64 waiting", 112, 16 + 64, MIXED_PROMPTS, MIXED_ANSWERS),
    tail=Workload("tail", "Tail", 512, 512, MIXED_PROMPTS, MIXED_ANSWERS),
    together=Workload("together", "64 at once", 64, 64, MIXED_PROMPTS, (128, 128)),
    streams=Workload("streams", "64 streams", 512, 64, (32, 256), (256, 256)),
    capacity=Workload("capacity", "Capacity", 320, 320, MIXED_PROMPTS, MIXED_ANSWERS),
    wide_slots=(20, 4096),
    decode=DECODE_32,
    long_prompts=Workload("long_prompts", "Long prompts", 24, 32 + 4, (8192, 8192), (16, 16), beside=DECODE_32),
    chunk=512,
    chunk_sizes=(64, 128, 256, 512, 1024, 2048, 4096),
    w4=Workload("w4", "W4 48 with a prefix", 48, 16, (1056, 1152), (32, 64), shared_prefix_tokens=1024),
    one_prefix=Workload("one_prefix", "One at a time", 8, 1, (8256, 8256), (16, 16), shared_prefix_tokens=8192),
    conversation=Workload("conversation", "Conversation", 1, 1, (256, 256), (64, 64), turns=10, turn_tokens=(64, 192)),
    agents=Workload("agents", "Agents", 16, 16, (2112, 2304), (16, 48), 2048, turns=8, turn_tokens=(256, 768)),
    decode_one=decoding("decode_one", 1, 256),
    decode_few=decoding("decode_few", 8, 256),
    decode_tens=decoding("decode_tens", 32, 256),
    decode_most=decoding("decode_most", 128, 256),
    sampled=Workload("sampled", "256 sampled", 256, 256, (100, 1024), (100, 1024), temperature=0.6),
    trials=3,
)

DEMO_PROMPTS, DEMO_ANSWERS = (8, 48), (4, 24)
DECODE_8 = Workload("decode", "8 decode", 8, 8, (8, 8), (32, 32))
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
    decode=DECODE_8,
    long_prompts=Workload("long_prompts", "Long prompts", 6, 8 + 2, (512, 512), (4, 4), beside=DECODE_8),
    chunk=32,
    chunk_sizes=(8, 16, 32, 64, 128, 256, 512),
    w4=Workload("w4", "W4 48 with a prefix", 48, 4, (1032, 1048), (4, 8), shared_prefix_tokens=1024),
    one_prefix=Workload("one_prefix", "One at a time", 4, 1, (1040, 1040), (4, 4), shared_prefix_tokens=1024),
    conversation=Workload("conversation", "Conversation", 1, 1, (64, 64), (16, 16), turns=10, turn_tokens=(16, 48)),
    agents=Workload("agents", "Agents", 16, 16, (136, 152), (4, 8), 128, turns=4, turn_tokens=(32, 64)),
    decode_one=decoding("decode_one", 1, 16),
    decode_few=decoding("decode_few", 2, 16),
    decode_tens=decoding("decode_tens", 4, 16),
    decode_most=decoding("decode_most", 8, 16),
    sampled=Workload("sampled", "16 sampled", 16, 16, (8, 48), (8, 48), temperature=0.6),
    trials=3,
)
"""Without a GPU: the same measurements in a few minutes, with the demo model."""


def default_size(device: str) -> ServingSize:
    """Full size on a GPU, otherwise the demo size."""
    return FULL if device.startswith("cuda") else DEMO
