"""One HTTP request on its way from the gateway to a replica. Follows phase 11.

Invariant: the response comes back as ASGI messages, so the replica's application decides every byte of it.
"""

from dataclasses import dataclass

APPLICATION = "infer"
REPLICAS = "Replica"
"""The deployment of :class:`shared.deployment.replica.Replica`, which is all that the application consists of."""


@dataclass(frozen=True)
class Exchange:
    """A request with its whole body.

    ``prefix`` are the keys from :func:`shared.deployment.affinity.prefix_keys`, by which the router chooses. ``index``
    selects the replica with this index, in the order of ids, and overrides the router.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None
    prefix: tuple[bytes, ...] = ()
    index: int | None = None
