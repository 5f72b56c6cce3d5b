"""A replica: one engine with the server's own application, in a process that Ray Serve manages. Follows phase 11.

Invariants: a replica is unhealthy exactly if its engine has stopped, and Ray Serve then replaces it; if the gateway of
a request is gone or has cancelled it, the request is aborted in the engine.
"""

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from ray import serve
from starlette.types import Message

from shared.deployment.exchange import Exchange
from shared.server.app import make_app
from shared.server.engine.process import EngineProcess
from shared.server.engine.thread import EngineThread
from shared.server.process import SWITCH_INTERVAL
from shared.server.settings import ServerConfig

REPLICA_HEADER = b"x-replica"
"""The header of a response that names the replica."""
_log = logging.getLogger("infer.server")


class Replica:
    """Serves each :class:`Exchange` as a stream of ASGI messages.

    Args:
        load: makes the engine, warmed up; picklable.
        is_process: whether the engine runs in its own process (:mod:`shared.server.engine.process`).
    """

    def __init__(self, load: Callable[[], Any], config: ServerConfig, is_process: bool) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._config = config
        self._app = make_app(EngineProcess(load) if is_process else EngineThread(load()), config)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._is_started = False
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._start = asyncio.Lock()

    async def exchange(self, request: Exchange) -> AsyncIterator[Message]:
        await self._started()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        closed, is_read = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": request.body, "more_body": False}
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]  # set by the gateway
                message["headers"] = [*kept, (REPLICA_HEADER, self._name)]
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(_scope(request, closed), receive, send)
            except Exception:
                _log.exception("a request failed")  # its response has been sent, with status 500
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            closed.set()
            await asyncio.shield(task)

    async def settings(self) -> ServerConfig:
        """What a gateway needs to check requests before it chooses a replica."""
        return self._config

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica if this raises."""
        await self._started()
        if not self._app.state.client.is_alive:
            raise RuntimeError(f"the engine has stopped ({self._app.state.client.crash})")

    async def __del__(self) -> None:
        """Called by Ray Serve once no request is open or the grace period is over; open requests end with an error."""
        if self._is_started:
            self._app.state.intake.is_draining = True
            await self._lifespan.__aexit__(None, None, None)

    async def _started(self) -> None:
        """Start the engine loop on the event loop that serves requests; the constructor may run on another one."""
        async with self._start:
            if not self._is_started:
                await self._lifespan.__aenter__()
                self._is_started = True
                gc.collect()
                gc.freeze()  # as `infer serve` does: later garbage collections then visit only what requests allocated


def _scope(request: Exchange, closed: asyncio.Event) -> dict[str, Any]:
    """Aborting the transport sets ``closed``."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
        "state": {"transport": SimpleNamespace(abort=closed.set)},
    }
