"""The fleet: requests, routers, replicas and a clock that jumps from event to event. Follows phase 11.

An event is an arrival, the end of a run of steps, a report of all loads, or a replica that has started. Events are kept
in a heap. Invariants: time never goes back; each request ends exactly once, even during an update; a draining replica
gets no requests.
"""

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shared.deployment.affinity import MAX_KEYS
from shared.errors import ConfigError
from shared.simulation.arrivals import Request
from shared.simulation.replica import EngineLimits, Replica
from shared.simulation.routing import ROUTERS, LeastBusy
from shared.simulation.step_times import StepTimes

_RUN_ENDS, _STARTED, _REPORT, _UPDATE = range(4)


@dataclass(frozen=True)
class FleetPlan:
    """The number of replicas, and the updates that they go through.

    Each of the ``gateways`` has its own router, which remembers ``table_keys`` prefix keys; a request may arrive at any
    of them. Routers learn the loads every ``report_seconds``; with 0 they always know them. From ``update_at`` on,
    replicas are replaced, ``update_together`` at a time: each drains, and another starts within ``start_seconds``.
    """

    replicas: int
    router: str = "prefix"
    gateways: int = 1
    table_keys: int = MAX_KEYS
    report_seconds: float = 0.0
    update_at: float | None = None
    update_together: int = 1
    start_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("replicas", "gateways", "table_keys", "update_together"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.router not in ROUTERS:
            raise ConfigError(f"router is {self.router!r}; it must be one of {', '.join(ROUTERS)}.")
        for name in ("report_seconds", "start_seconds", "update_at"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"{name} is {value:g}; it cannot be negative.")
        if self.update_at is not None and self.update_together >= self.replicas:
            raise ConfigError(
                f"update_together is {self.update_together}; of {self.replicas} replicas some must go on serving."
            )


class Fleet:
    """Serves one trace."""

    def __init__(self, plan: FleetPlan, times: StepTimes, limits: EngineLimits, seed: int = 0) -> None:
        self.plan, self.times, self.limits = plan, times, limits
        self.draw = random.Random(f"{seed} gateways")
        make = ROUTERS[plan.router]
        self.routers = [
            make(random.Random(f"{seed} {n}"), limits.block_size, plan.table_keys) for n in range(plan.gateways)
        ]
        self.listeners = [router for router in self.routers if isinstance(router, LeastBusy)]
        self.replicas: dict[int, Replica] = {}  # by name; names are never reused
        self.loads: dict[int, int] = {}  # ongoing requests of each replica that accepts new ones
        self.seen = self.loads  # the loads as the routers know them
        self.names: list[int] = []  # the same replicas, for routers that sample some of them
        self.old: list[int] = []  # replicas still to be replaced
        self.events: list[tuple[float, int, int, int]] = []  # a heap: time, kind, number, replica
        self.num_events = 0
        self.has_arrivals = True
        for _ in range(plan.replicas):
            self._start()
        if plan.report_seconds:
            self._report(0.0)
        if plan.update_at is not None:
            self._push(plan.update_at, _UPDATE)

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield each request when its answer is complete; ends when all answers are. Raises CapacityError for a request
        that no replica could hold.
        """
        for request in requests:
            yield from self._until(request.arrival)
            self._arrive(request)
        self.has_arrivals = False
        yield from self._until(math.inf)

    def _until(self, moment: float) -> Iterator[Request]:
        """Process events up to a point in time."""
        while self.events and self.events[0][0] <= moment:
            now, kind, _, name = heapq.heappop(self.events)
            if kind == _RUN_ENDS:
                if self.replicas[name].ends == now:  # otherwise the run was cut short and ended earlier
                    yield from self._end_run(name, now)
            elif kind == _STARTED:
                self._start()
                self._drain_next(now)
            elif kind == _REPORT:
                self._report(now)
            else:
                self.old = list(self.replicas)[::-1]
                for _ in range(self.plan.update_together):
                    self._drain_next(now)

    def _arrive(self, request: Request) -> None:
        router = self.routers[self.draw.randrange(len(self.routers)) if len(self.routers) > 1 else 0]
        request.replica = router.choose(request, self.names, self.seen)
        replica = self.replicas[request.replica]
        replica.add(request)
        self._set_load(request.replica, replica.num_ongoing)
        now = request.arrival
        ends = replica.cut(now) if replica.is_busy else replica.plan(now)
        if ends is not None:
            self._push(ends, _RUN_ENDS, request.replica)

    def _end_run(self, name: int, now: float) -> Iterator[Request]:
        replica = self.replicas[name]
        done = replica.finish(now)
        if done and name in self.loads:
            self._set_load(name, replica.num_ongoing)
        ends = replica.plan(now)
        if ends is not None:
            self._push(ends, _RUN_ENDS, name)
        elif name not in self.loads:
            self._push(now + self.plan.start_seconds, _STARTED)
        yield from done

    def _drain_next(self, now: float) -> None:
        """Retire the next old replica: it gets no more requests, and another one starts once it has answered its
        last."""
        if self.old:
            # exercise 12.1x5: take the next old replica from the routers, and lose none of its requests
            # hint: routers choose from `seen`, which is `loads` itself or its last report
            # hint: `_end_run` handles a busy replica once its last answer is complete; an idle one has no run
            name = self.old.pop()
            del self.loads[name]
            self.seen.pop(name, None)
            if not self.replicas[name].num_ongoing:
                self._push(now + self.plan.start_seconds, _STARTED)
            # end exercise
            self.names = list(self.seen)

    def _start(self) -> None:
        """Add a replica; routers always know which replicas exist."""
        name = len(self.replicas)
        self.replicas[name] = Replica(self.times, self.limits)
        self.loads[name] = self.seen[name] = 0
        self.names.append(name)
        self._tell(name, 0)

    def _set_load(self, name: int, load: int) -> None:
        self.loads[name] = load
        if self.seen is self.loads:
            self._tell(name, load)

    def _tell(self, name: int, load: int) -> None:
        for router in self.listeners:
            router.report(name, load)

    def _report(self, now: float) -> None:
        """Report the loads to the routers, which know nothing newer until the next report."""
        self.seen = dict(self.loads)
        self.names = list(self.seen)
        for name, load in self.seen.items():
            self._tell(name, load)
        if self.has_arrivals:
            self._push(now + self.plan.report_seconds, _REPORT)

    def _push(self, moment: float, kind: int, name: int = -1) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (moment, kind, self.num_events, name))
