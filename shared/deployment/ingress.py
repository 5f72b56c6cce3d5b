"""Where requests arrive: middleware in Ray Serve's HTTP proxy, which runs on each node. Follows phase 11.

Ray Serve imports :func:`middleware` in the process of a proxy if ``VARIABLE`` names it. The proxy must be ready within
five seconds, and importing PyTorch alone may take that long, so the gateway loads on a separate thread. Requests that
arrive earlier wait.
Invariants: paths below ``/-/`` belong to Ray Serve; a proxy does not stop while it has an open stream.
"""

import asyncio
import importlib
import threading
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MIDDLEWARE = "shared.deployment.ingress:middleware"
GATEWAY = "shared.deployment.gateway"


def middleware() -> list[Middleware]:
    """The middleware that Ray Serve wraps around its proxy's application."""
    return [Middleware(Ingress)]


class Ingress:
    """Passes every request to the gateway; ``app`` is the proxy's own application, inside a middleware for request
    ids."""

    def __init__(self, app: Any) -> None:
        self._app: ASGIApp = app
        self._proxy = app._app
        self._gateway: asyncio.Task[ASGIApp] | None = None
        threading.Thread(target=importlib.import_module, args=(GATEWAY,), daemon=True).start()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        if self._gateway is None or (self._gateway.done() and self._gateway.exception() is not None):
            self._gateway = asyncio.create_task(_load())
        gateway = await asyncio.shield(self._gateway)
        self._proxy._ongoing_requests_start()  # tells Ray Serve when a draining proxy may stop
        try:
            await gateway(scope, receive, send)
        finally:
            self._proxy._ongoing_requests_end()


async def _load() -> ASGIApp:
    module = await asyncio.to_thread(importlib.import_module, GATEWAY)
    gateway: ASGIApp = module.Gateway()
    return gateway
