"""Starts or joins Ray, and deploys the application: gateways and replicas. Follows phase 11.

Invariant: only the process that started Ray ends it, so a command that joins a cluster leaves it running.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Read when Ray is imported; its processes inherit them.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported home
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")  # one event loop a process
os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
os.environ.setdefault("RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE", "1000")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.schema import ServeStatus

from shared.deployment.gateway import APPLICATION, REPLICAS, Gateway
from shared.deployment.replica import Replica
from shared.deployment.router import PrefixRouter
from shared.errors import ConfigError
from shared.server.settings import ServerConfig

ROUTERS = {
    "prefix": PrefixRouter,
    "two-choices": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "round-robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
}
HEALTH_PERIOD = 2.0
"""Seconds between two health checks of a replica; a killed one is replaced after at most this time."""
HEALTH_TIMEOUT = 60.0
GATEWAY_GRACE = 10.0
"""Seconds for which a gateway outlives the replicas that are replaced with it, to end their streams with an error."""

_INIT: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "infer"}


@dataclass(frozen=True)
class Fleet:
    """How many replicas run, on what, and how requests reach them.

    ``max_replicas`` above ``replicas`` scales between the two, so that each has ``target_ongoing_requests``.
    """

    replicas: int
    max_replicas: int
    target_ongoing_requests: int
    max_ongoing_requests: int
    gateways: int
    cpus: float
    gpus: float
    router: str

    def __post_init__(self) -> None:
        for name in ("replicas", "gateways", "target_ongoing_requests", "max_ongoing_requests"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas is {self.max_replicas}; it must be at least replicas, {self.replicas}.")
        if self.cpus < 0 or self.gpus < 0:
            raise ConfigError(f"A replica has {self.cpus:g} CPUs and {self.gpus:g} GPUs; neither can be negative.")
        if self.router not in ROUTERS:
            raise ConfigError(f"router is {self.router!r}; it must be one of {', '.join(ROUTERS)}.")


def join(address: str | None) -> bool:
    """Join the cluster at ``address``, or the one of this machine; false if this machine has none.

    Raises ConfigError if no cluster answers at a given address.
    """
    try:
        ray.init(address=address or "auto", **_INIT)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address is not None:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"No Ray cluster answers at {address} ({reason}).") from None
        return False
    return True


def start(host: str, port: int) -> None:
    """Start Ray on this machine, and the HTTP proxy; both end with this process."""
    ray.init(address="local", include_dashboard=False, **_INIT)
    serve.start(http_options=HTTPOptions(host=host, port=port))


def deploy(load: Callable[[], Any], config: ServerConfig, fleet: Fleet, *, is_process: bool) -> None:
    """Deploy the application, or update the one that runs, replica by replica; returns when it serves.

    Raises:
        ConfigError: Ray Serve gave up; its message says why.
    """
    scaling: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas > fleet.replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fleet.replicas,
                max_replicas=fleet.max_replicas,
                target_ongoing_requests=fleet.target_ongoing_requests,
            )
        }
    drain = {"graceful_shutdown_timeout_s": config.grace, "graceful_shutdown_wait_loop_s": 0.5}
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        max_ongoing_requests=fleet.max_ongoing_requests,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        request_router_config=RequestRouterConfig(request_router_class=ROUTERS[fleet.router]),
        **drain,
        **scaling,
    )
    gateway = serve.deployment(
        Gateway,
        num_replicas=fleet.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=config.max_connections,
        **drain | {"graceful_shutdown_timeout_s": config.grace + GATEWAY_GRACE},
    )
    try:
        serve.run(gateway.bind(replicas.bind(load, config, is_process), config), name=APPLICATION)
    except RuntimeError as error:
        raise ConfigError(f"Ray Serve could not deploy the application: {error}") from None


def status() -> ServeStatus:
    """What Ray Serve says of its applications."""
    return serve.status()


def is_deployed() -> bool:
    return APPLICATION in serve.status().applications


def remove() -> None:
    """Take the application down: open requests may finish within the grace time."""
    serve.delete(APPLICATION)


def end() -> None:
    """End the application and the Ray that this process started."""
    serve.shutdown()
    ray.shutdown()
