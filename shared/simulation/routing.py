"""The routers of a simulated fleet; by prefix it is the decision that ``infer deploy`` takes. Follows phase 11.

Invariant: a router sees what a gateway could know: the load of each replica as it was last reported, the prompt, and
where it sent the prompts before.
"""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from shared.deployment.affinity import PrefixTable, drawn, ranked
from shared.simulation.arrivals import Request

Names = Sequence[int]
"""The replicas that may be chosen."""
Loads = Mapping[int, int]
"""The ongoing requests of each of them."""


class Router(ABC):
    """Chooses a replica for each request."""

    def __init__(self, draw: random.Random, block_tokens: int, table_keys: int) -> None:
        self.draw, self.block_tokens = draw, block_tokens
        self.table: PrefixTable[int, int] = PrefixTable(table_keys)  # empty but by prefix

    @abstractmethod
    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        """One of ``names``. Invariant: a request does not cost time for each replica."""


class RoundRobin(Router):
    """One replica after the other."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.left: list[int] = []

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        while True:
            self.left = self.left or list(names)[::-1]
            if (replica := self.left.pop()) in loads:
                return replica


class LeastBusy(Router):
    """The replica with the fewest ongoing requests, of several a random one. A heap finds it without a look at all."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.heap: list[tuple[int, float, int]] = []

    def report(self, replica: int, load: int) -> None:
        """A replica says how many requests it has."""
        heapq.heappush(self.heap, (load, self.draw.random(), replica))

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        while loads.get(self.heap[0][2]) != self.heap[0][0]:
            heapq.heappop(self.heap)
        load, _, replica = self.heap[0]
        heapq.heapreplace(self.heap, (load, self.draw.random(), replica))
        return replica


class TwoChoices(Router):
    """The less busy of two replicas that are drawn."""

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        return min(drawn(names, self.draw), key=loads.__getitem__)


class ByPrefix(Router):
    """The replica that was sent the longest prefix, unless it is much busier: as the gateway chooses."""

    def choose(self, request: Request, names: Names, loads: Loads) -> int:
        keys = request.blocks[: request.prompt_tokens // self.block_tokens]
        best, *_ = ranked(drawn(names, self.draw), loads, self.table.matches(keys), len(keys))
        replica = min(best, key=loads.__getitem__)
        self.table.record(keys, replica)
        return replica


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-busy": LeastBusy,
    "two-choices": TwoChoices,
    "prefix": ByPrefix,
}
