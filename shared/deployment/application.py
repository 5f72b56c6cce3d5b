"""Starts or joins Ray, and deploys the application: replicas behind a gateway. Follows phase 11.

Invariant: only the process that started Ray stops it, so a command that joins a cluster leaves it running.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared.deployment.ingress import MIDDLEWARE, VARIABLE

# Read when Ray is imported; its processes inherit these variables.
os.environ.setdefault("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "2")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")  # one event loop per process
os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
os.environ.setdefault("RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE", "1000")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
os.environ.setdefault(VARIABLE, MIDDLEWARE)

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.schema import ServeStatus

from shared.deployment.exchange import APPLICATION, REPLICAS
from shared.deployment.replica import Replica
from shared.deployment.router import PrefixRouter, TurnsRouter, TwoChoicesRouter
from shared.errors import ConfigError
from shared.server.settings import ServerConfig

ROUTERS = {"prefix": PrefixRouter, "two-choices": TwoChoicesRouter, "round-robin": TurnsRouter}
LOOK_BACK = 12.0
"""Seconds over which ongoing requests are averaged for scaling."""
HEALTH_PERIOD = 2.0
"""Seconds between two health checks of a replica; a killed one is replaced after at most this time."""
HEALTH_TIMEOUT = 60.0

_INIT: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "infer"}


@dataclass(frozen=True)
class Fleet:
    """How many replicas run, with which resources, and how requests reach them.

    ``max_replicas`` above ``replicas`` scales between the two towards ``target_ongoing_requests`` per replica, once the
    load has lasted ``upscale_delay`` or ``downscale_delay`` seconds. Beyond ``max_ongoing_requests`` per replica, as
    many again wait in each gateway; the rest are refused. All ``ranks`` of a replica run on one machine with its
    ``cpus`` and ``gpus``.
    """

    replicas: int
    max_replicas: int
    target_ongoing_requests: int
    upscale_delay: float
    downscale_delay: float
    max_ongoing_requests: int
    ranks: int
    cpus: float
    gpus: float
    router: str

    def __post_init__(self) -> None:
        for name in ("replicas", "ranks", "target_ongoing_requests", "max_ongoing_requests"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas is {self.max_replicas}; it must be at least replicas, {self.replicas}.")
        if min(self.upscale_delay, self.downscale_delay) < 0:
            delays = f"{self.upscale_delay:g} s and {self.downscale_delay:g} s"
            raise ConfigError(f"upscale_delay and downscale_delay are {delays}; neither can be negative.")
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
        if address is None:
            return False
        raise ConfigError(f"No Ray cluster answers at {address} ({str(error).splitlines()[0]}).") from None
    return True


def start() -> None:
    """Start Ray on this machine; it ends with this process."""
    ray.init(address="local", include_dashboard=False, **_INIT)


def check_proxies() -> None:
    """Raise ConfigError if the cluster's Ray was started without the gateway in its proxies."""

    def read() -> str | None:
        return os.environ.get(VARIABLE)

    found = ray.get(ray.remote(num_cpus=0)(read).remote())
    if found != MIDDLEWARE:
        raise ConfigError(
            f"In this cluster {VARIABLE} is {found!r}; where Ray is started on a node, it must be {MIDDLEWARE!r}."
        )


def listen(host: str, port: int) -> None:
    """Start the HTTP proxies, one on each node with replicas, unless they already run."""
    serve.start(proxy_location="EveryNode", http_options=HTTPOptions(host=host, port=port))


def deploy(load: Callable[[], Any], config: ServerConfig, fleet: Fleet, *, is_process: bool) -> None:
    """Deploy the application, or update the running one replica by replica; returns when it is serving.

    Raises:
        ConfigError: Ray Serve has given up; its message says why.
    """
    scaling: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas > fleet.replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fleet.replicas,
                max_replicas=fleet.max_replicas,
                target_ongoing_requests=fleet.target_ongoing_requests,
                look_back_period_s=LOOK_BACK,
                upscale_delay_s=fleet.upscale_delay,
                downscale_delay_s=fleet.downscale_delay,
            )
        }
    # the replica starts the processes of its ranks itself, so it needs a single bundle, and therefore one machine
    if fleet.ranks > 1:
        bundle = {"CPU": fleet.cpus, "GPU": fleet.gpus} if fleet.gpus else {"CPU": fleet.cpus}
        scaling |= {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        max_ongoing_requests=fleet.max_ongoing_requests,
        max_queued_requests=fleet.max_ongoing_requests * fleet.max_replicas,
        graceful_shutdown_timeout_s=config.grace,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        request_router_config=RequestRouterConfig(request_router_class=ROUTERS[fleet.router]),
        **scaling,
    )
    try:
        serve.run(replicas.bind(load, config, is_process), name=APPLICATION)
    except RuntimeError as error:
        raise ConfigError(f"Ray Serve could not deploy the application: {error}") from None


def status() -> ServeStatus:
    """Ray Serve's status of its applications."""
    return serve.status()


def is_deployed() -> bool:
    return APPLICATION in serve.status().applications


def remove() -> None:
    """Take the application down: open requests may finish within the grace time."""
    with suppress(RayActorError):  # the command that started Ray may stop it first
        serve.delete(APPLICATION)


def end() -> None:
    """Stop the application and the Ray that this process started."""
    serve.shutdown()
    ray.shutdown()
