"""Connects Ray Serve's router interface to the decisions of :mod:`shared.deployment.affinity`. Follows phase 11.

Ray Serve makes one in each process that has a handle to the replicas, and therefore in each gateway. Invariant: a
request whose ``index`` is set goes to that replica, so a gateway can ask each replica for its metrics.
"""

import random
from collections.abc import Sequence
from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.experimental.round_robin_router import RoundRobinRouter
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from shared.deployment.affinity import PrefixTable, ranked, sample_two
from shared.deployment.exchange import Exchange


class ByIndex(RequestRouter):
    """Routes a request whose ``index`` is set to that replica, and leaves the others to the next class."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        if asked_for := _asked_for(candidate_replicas, pending_request):
            return asked_for
        chosen: Sequence[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return chosen


class TwoChoicesRouter(ByIndex, PowerOfTwoChoicesRequestRouter):
    """Ray Serve's own: the less busy of two random replicas."""


class TurnsRouter(ByIndex, RoundRobinRouter):
    """Ray Serve's own: round robin."""


class PrefixRouter(RequestRouter):
    """The course's own router: by prefix, or else by the power of two choices. Ray Serve takes the least busy replica
    of the first group.

    Ray's ``FIFOMixin`` is omitted: it gives the replica that was chosen for one request to the oldest waiting request.
    """

    def initialize_state(self, **settings: Any) -> None:
        """``settings`` are the keyword arguments of :func:`shared.deployment.affinity.ranked`."""
        self._settings = settings
        self._table: PrefixTable[bytes, ReplicaID] = PrefixTable()
        self._draw = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        if asked_for := _asked_for(candidate_replicas, pending_request):
            return asked_for
        exchange = _exchange(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # between two attempts while every replica is full
        if not candidate_replicas or exchange is None:
            return [candidate_replicas]
        two = [replica.replica_id for replica in sample_two(candidate_replicas, self._draw)]
        matches, replicas = self._table.matches(exchange.prefix), self.curr_replicas
        queues = self.replica_queue_len_cache
        loads = {replica_id: queues.get(replica_id) or 0 for replica_id in (*two, *matches) if replica_id in replicas}
        groups = ranked(two, loads, matches, len(exchange.prefix), **self._settings)
        return [[replicas[replica_id] for replica_id in group] for group in groups]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        exchange = _exchange(pending_request)
        if exchange is not None:
            self._table.record(exchange.prefix, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep({replica.replica_id for replica in replicas})


def _asked_for(
    candidates: list[RunningReplica], pending_request: PendingRequest | None
) -> Sequence[list[RunningReplica]]:
    """The replica of a request whose ``index`` is set; empty for other requests."""
    exchange = _exchange(pending_request)
    if not candidates or exchange is None or exchange.index is None:
        return []
    in_order = sorted(candidates, key=lambda replica: replica.replica_id.unique_id)
    return [[in_order[exchange.index % len(in_order)]]]


def _exchange(pending: PendingRequest | None) -> Exchange | None:
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, Exchange) else None
