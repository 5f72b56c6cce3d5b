"""The ASGI application: an engine's client, the routes and the middleware. Introduced in phase 4.

Invariant: the middleware around a route is, from the outside in: log, hosts, origins, API key, body limits. So every
refusal is logged, and a body sent without the key is never read.
"""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from shared.server import pages
from shared.server.answers.intake import Intake
from shared.server.engine.client import EngineClient
from shared.server.engine.loop import EngineHandle
from shared.server.errors import ErrorBody, install
from shared.server.http.description import describe
from shared.server.http.logs import log_event
from shared.server.http.middleware import AllowedHosts, ApiKey, BodyLimit, RequestLog
from shared.server.metrics import ServerMetrics
from shared.server.routes import chat, chunks, completions, segments, status
from shared.server.settings import EXPOSED, ServerConfig

_STATUSES = {
    400: "not JSON, a field is missing, or the host is not allowed",
    401: "the API key is missing or wrong",
    408: "the body did not arrive in time, or the client did not read the answer",
    413: "the body is too long, or holds too many values",
    422: "an invalid value",
    500: "the engine failed",
    503: "the queue is full, too many connections are open, or the server is shutting down",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _STATUSES.items()
}


def make_app(handle: EngineHandle, config: ServerConfig) -> FastAPI:
    """Make the application; its lifespan starts and stops the engine loop."""
    metrics = ServerMetrics(config.model_name)
    client = EngineClient(handle, metrics, config)
    metrics.watch(lambda: client.load, lambda: client.is_alive)
    intake = Intake(handle, client, config)
    for capability, reason in intake.chat.refusals.items():
        log_event(logging.WARNING, f"{capability} is refused", reason=reason)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client.start()
        intake.start()
        yield
        await client.stop()
        intake.close()

    app = FastAPI(
        title="infer",
        description="An OpenAI-compatible server over the course's engine.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.config = config
    app.state.client = client
    app.state.intake = intake
    app.state.metrics = metrics
    app.state.started = time.time()
    install(app)
    describe(app, intake)
    routers = [part.router for part in (completions, chat, segments, chunks, status, pages)]
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    app.add_middleware(
        BodyLimit, max_bytes=config.max_body_bytes, seconds=config.body_timeout, stopping=intake.stopping
    )
    if config.api_key is not None:
        app.add_middleware(ApiKey, key=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    if config.allowed_hosts:
        app.add_middleware(AllowedHosts, hosts=config.allowed_hosts)
    app.add_middleware(RequestLog, metrics=metrics, root_path=config.root_path)
    return app
