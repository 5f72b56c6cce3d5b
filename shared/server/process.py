"""The server process: socket, signals, shutdown. Introduced in phase 4.

Invariants: a port in use is a ConfigError before the model is loaded. There are descriptors for all allowed
connections, so none is refused without a log line. After SIGTERM the server refuses new requests, lets running ones
finish until shortly before the grace period ends, ends the rest with an error event, and exits with 0.
"""

import asyncio
import gc
import ipaddress
import logging
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI

from shared.errors import ConfigError, RankError
from shared.server.http.connection import Connection
from shared.server.http.logs import log_event
from shared.server.settings import ServerConfig

SEND_BUFFER_BYTES = 128 * 2**10
"""The kernel's send buffer of a connection. By default it grows to megabytes, which an unread answer would fill."""
BACKLOG = 2048
SWITCH_INTERVAL = 0.0005
"""Seconds for which a thread keeps Python's lock while another waits for it. An engine's step on a thread releases the
lock at each operation, so with Python's default of 5 ms it takes seconds while a large body is validated."""
SPARE_DESCRIPTORS = 64
"""Descriptors for files, and for connections that are refused."""


class Server(uvicorn.Server):
    """uvicorn's server with the shutdown described above."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, limits=config, metrics=app.state.metrics),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=config.grace,  # type: ignore[arg-type]  # seconds, whole or not
            )
        )
        self._application, self._settings = app, config
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.has_lost_engine = False
        app.state.client.end_server = self._lose_engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._event_loop is not None:  # a signal may arrive between any two instructions
            self._event_loop.call_soon_threadsafe(self._drain)

    def _lose_engine(self) -> None:
        self.has_lost_engine = self.should_exit = True

    def _drain(self) -> None:
        """Refuse new requests, and end running ones shortly before the grace period ends."""
        intake, client = self._application.state.intake, self._application.state.client
        if intake.is_draining:
            return
        intake.is_draining, grace = True, self._settings.grace
        log_event(logging.INFO, "shutting down", open_requests=client.num_open_requests, grace_s=grace)
        asyncio.get_running_loop().call_later(max(0.8 * grace, grace - 1), client.end_all, intake.stopping())


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; raises ConfigError if the address cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a peer that vanished
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"Port {port} of {host} cannot be bound ({reason}); choose another with --port, or stop the process that "
            "uses it."
        ) from None
    return bound


def _affordable(wanted: int) -> int:
    """The number of connections that the process has descriptors for, at most ``wanted``; raises the process's limit as
    far as allowed.

    Without a free descriptor, libuv accepts connections only to close them, unseen by the server.
    """
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = psutil.Process().num_fds() + SPARE_DESCRIPTORS
    needed = wanted + taken
    if most == resource.RLIM_INFINITY or most >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # macOS reports no hard limit, but refuses more than its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        most = raised
    if most >= needed:
        return wanted
    allowed = max(1, most - taken)
    log_event(logging.WARNING, "fewer connections than configured", descriptors=most, max_connections=allowed)
    return allowed


def is_exposed(bound: socket.socket) -> bool:
    """Whether other machines may reach the socket."""
    return not ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def address_of(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, config: ServerConfig, bound: socket.socket, **described: Any) -> None:
    """Serve until SIGTERM, then return; SIGINT raises KeyboardInterrupt, and a lost rank raises RankError.

    ``described`` is logged when the server is ready.
    """
    if config.api_key is None and is_exposed(bound):
        log_event(logging.WARNING, "other machines may send requests: there is no API key (--api-key)")
    server = Server(app, replace(config, max_connections=_affordable(config.max_connections)))
    gc.collect()
    gc.freeze()  # later collections visit only what requests allocate, which saves 0.1 s for a large body
    sys.setswitchinterval(SWITCH_INTERVAL)
    # SIGTERM may arrive before uvicorn's handler is installed; when uvicorn is done, it raises the signal again for
    # this handler.
    before = signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        bound.listen(BACKLOG)
        log_event(logging.INFO, "ready", url=address_of(bound), **described)
        server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)
    if server.has_lost_engine:
        raise RankError(app.state.client.crash)
