"""The arriving requests and their times: sampled from conversations, or read from a recorded trace. Follows phase 11.

A request's text is represented by its blocks. Each whole block of tokens has an id, and equal ids mean that all tokens
up to the end of the block are equal, as in the traces that Mooncake published (Qin et al., FAST 2025).
Invariants: requests are in order of arrival; a trace depends only on its arguments and the seed, so each router gets
the same one.
"""

import heapq
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

from shared.errors import ConfigError, RequestError

SPREAD = 0.7
"""Standard deviation of the logarithm of a length: nine of ten are between a third of the median and three times it."""


@dataclass(slots=True, eq=False)
class Request:
    """One request; times are seconds from the start of the trace.

    ``blocks`` are the ids of the whole blocks of prompt and answer. The fields below are set while it is served.
    """

    arrival: float
    prompt_tokens: int
    new_tokens: int
    blocks: tuple[int, ...]
    replica: int = -1
    num_computed: int = 0
    num_cached: int = 0
    num_shared: int = 0  # its first blocks, already in the prefix tree
    num_own: int = 0  # the other blocks reserved for it
    scheduled: float = math.nan
    first_token: float = math.nan
    ended: float = math.nan


@dataclass(frozen=True)
class Conversations:
    """What people send. A conversation begins with one of the ``systems`` system prompts, popular ones more often (the
    n-th is 1/n as likely as the first), and each turn's prompt repeats the whole conversation so far. Lengths are
    log-normal around their means, the number of turns is geometric, and the time between turns exponential.
    """

    systems: int = 64
    system_tokens: int = 384
    turn_tokens: int = 128
    new_tokens: int = 192
    turns: float = 4.0
    pause: float = 15.0
    max_tokens: int = 8192
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= (0 if name in ("system_tokens", "pause") else 1):
                raise ConfigError(f"{name} is {value}; it must be at least 1 (system_tokens and pause: 0).")
        if self.system_tokens + self.turn_tokens + self.new_tokens > self.max_tokens:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, which is too few for the first turn of a conversation."
            )


@dataclass(slots=True, eq=False)
class _Conversation:
    system: int
    name: int
    num_tokens: int
    turns_left: int


def _bursts(position: float) -> float:
    """Ten bursts per trace, each lasting a fifth of the time."""
    return 3.0 if position * 10 % 1 < 0.2 else 0.5


SHAPES: dict[str, Callable[[float], float]] = {
    "steady": lambda position: 1.0,
    "poisson": lambda position: 1.0,
    "bursts": _bursts,
    "day": lambda position: 1 - 0.6 * math.cos(2 * math.pi * position),
}
"""The rate of requests relative to its mean, by the position in the trace from 0 to 1. ``steady`` requests arrive at
even intervals, the others at random. ``day``: four times as many at noon as at midnight."""


def arrival_times(shape: str, rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Times from 0 to ``seconds``, on average ``rate`` per second; raises ConfigError for a bad argument."""
    if shape not in SHAPES:
        raise ConfigError(f"The arrivals are {shape!r}; they must be one of {', '.join(SHAPES)}, or a file.")
    if not (0 < rate < math.inf and 0 < seconds < math.inf):
        raise ConfigError(f"A trace of {seconds:g} s with {rate:g} requests a second; both must be positive.")
    if shape == "steady":
        yield from (n / rate for n in range(math.ceil(rate * seconds)))
        return
    draw, density = random.Random(f"{seed} times"), SHAPES[shape]
    most = max(density(n / 1000) for n in range(1000))
    now = draw.expovariate(rate * most)
    while now < seconds:  # thinning: from arrivals at the highest rate, keep the fraction that the shape requires
        if draw.random() * most < density(now / seconds):
            yield now
        now += draw.expovariate(rate * most)


def conversations(times: Iterator[float], settings: Conversations, seed: int) -> Iterator[Request]:
    """A request at each of these times: the next turn of the conversation that is due first, or a new conversation."""
    draw, names = random.Random(f"{seed} conversations"), count()
    weights = list(accumulate(1 / n for n in range(1, settings.systems + 1)))
    due: list[tuple[float, int, _Conversation]] = []
    size = settings.block_tokens
    for now in times:
        if due and due[0][0] <= now:
            turn = heapq.heappop(due)[2]
        else:
            system = draw.choices(range(settings.systems), cum_weights=weights)[0]
            turn = _Conversation(system, next(names), settings.system_tokens, _turns(draw, settings.turns))
        prompt, new = turn.num_tokens + _tokens(draw, settings.turn_tokens), _tokens(draw, settings.new_tokens)
        if prompt + new > settings.max_tokens:  # it would not fit, so a new conversation starts
            turn = _Conversation(turn.system, next(names), settings.system_tokens, turn.turns_left)
            prompt, new = turn.num_tokens + settings.turn_tokens, settings.new_tokens
        num_shared, base = settings.system_tokens // size, (turn.name + settings.systems) << 16
        shared = range(turn.system << 16, (turn.system << 16) + num_shared)
        yield Request(now, prompt, new, (*shared, *range(base + num_shared, base + (prompt + new) // size)))
        turn.num_tokens, turn.turns_left = prompt + new, turn.turns_left - 1
        if turn.turns_left > 0:
            pause = draw.expovariate(1 / settings.pause) if settings.pause else 0.0
            heapq.heappush(due, (now + pause, turn.name, turn))


def _tokens(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)))


def _turns(draw: random.Random, mean: float) -> int:
    return 1 if mean == 1 else 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / mean))


def recorded(path: Path, block_tokens: int, rate: float | None = None) -> Iterator[Request]:
    """The requests in a file, one line of JSON each, in the format of Mooncake's traces: ``timestamp`` (milliseconds),
    ``input_length``, ``output_length`` (tokens), and optionally ``hash_ids``, one id for each block of the prompt.

    Args:
        block_tokens: tokens of the blocks that ``hash_ids`` name.
        rate: requests per second; times are scaled to this rate. None keeps them.

    Raises:
        RequestError: a line is not such a request.
    """
    found: list[Request] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            arrival, prompt, new = (entry[key] for key in ("timestamp", "input_length", "output_length"))
            blocks = tuple(entry.get("hash_ids", ()))[: prompt // block_tokens]
            if not (arrival >= 0 and prompt >= 1 and new >= 0 and all(isinstance(block, int) for block in blocks)):
                raise ValueError("a number is out of range")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(
                f"Line {number} of the trace is no request ({type(error).__name__}: {error}); it must be a JSON object "
                "with timestamp, input_length, output_length and perhaps hash_ids."
            ) from None
        found.append(Request(arrival / 1000, prompt, max(new, 1), blocks))
    if not found:
        raise RequestError(f"The trace {path.name} has no requests.")
    found.sort(key=lambda request: request.arrival)
    first, last = found[0].arrival, found[-1].arrival
    factor = 1.0 if rate is None or first == last else len(found) / rate / (last - first)
    for request in found:
        request.arrival = (request.arrival - first) * factor
    yield from found
