"""The routers of a simulated fleet; routing by prefix uses the same decision as ``infer deploy``. Follows phase 11.

Invariant: a router knows only what a gateway could know: each replica's last reported load, the prompt, and where it
sent earlier prompts.
"""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from shared.deployment.affinity import PrefixTable, ranked, sample_two
from shared.simulation.arrivals import Request

Names = Sequence[int]
"""The replicas that may be chosen."""
Loads = Mapping[int, int]
"""The ongoing requests of each of them."""


class Router(ABC):
    """Chooses a replica for each request."""

    def __init__(self, draw: random.Random, block_tokens: int, table_keys: int) -> None:
        self.draw, self.block_tokens = draw, block_tokens
        self.table: PrefixTable[int, int] = PrefixTable(table_keys)  # empty except when routing by prefix

    @abstractmethod
    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        """One of ``names``. Invariant: the cost of a request does not grow with the number of replicas."""


class RoundRobin(Router):
    """Round robin."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.left: list[int] = []

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        while True:
            self.left = self.left or list(names)[::-1]
            if (replica := self.left.pop()) in loads:
                return replica


class LeastBusy(Router):
    """The replica with the fewest ongoing requests; ties are broken at random. A heap finds it without looking at all
    replicas."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.heap: list[tuple[int, float, int]] = []

    def report(self, replica: int, load: int) -> None:
        """A replica reports its number of requests."""
        heapq.heappush(self.heap, (load, self.draw.random(), replica))

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        while loads.get(self.heap[0][2]) != self.heap[0][0]:
            heapq.heappop(self.heap)
        load, _, replica = self.heap[0]
        heapq.heapreplace(self.heap, (load, self.draw.random(), replica))
        return replica


class TwoChoices(Router):
    """The less busy of two random replicas."""

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        return min(sample_two(names, self.draw), key=loads.__getitem__)


class ByPrefix(Router):
    """The replica that was sent the longest prefix, unless it is much busier, as the gateway chooses."""

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        keys = request.blocks[: request.prompt_tokens // self.block_tokens]
        best, *_ = ranked(sample_two(names, self.draw), loads, self.table.matches(keys), len(keys))
        replica = min(best, key=loads.__getitem__)
        self.table.record(keys, replica)
        return replica


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-busy": LeastBusy,
    "two-choices": TwoChoices,
    "prefix": ByPrefix,
}
