"""The application: an engine, its client, and the routes around them. Introduced in phase 4.

Invariant: what surrounds a route is, from outside, the log, the key, the limits of the body. So every refusal is
logged, and nobody without a key has a body read.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from shared.server import chat, completions, pages, status
from shared.server.engine_client import EngineClient
from shared.server.engine_loop import EngineHandle
from shared.server.errors import ErrorBody, install
from shared.server.intake import Intake
from shared.server.metrics import ServerMetrics
from shared.server.middleware import ApiKey, BodyLimit, RequestLog
from shared.server.settings import ServerConfig

_STATUSES = {
    400: "no JSON, or a field is missing",
    401: "the API key is missing or wrong",
    408: "the body did not arrive in time",
    413: "the body is too long",
    422: "a value that is not possible here",
    500: "the engine failed",
    503: "the queue is full, or the server is shutting down",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _STATUSES.items()
}


def make_app(handle: EngineHandle, config: ServerConfig) -> FastAPI:
    """The ASGI application that serves the handle's engine; its lifespan starts and stops the engine's loop."""
    metrics = ServerMetrics(config.model_name)
    client = EngineClient(handle, metrics, config)
    metrics.watch(lambda: client.load)
    intake = Intake(handle, client, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client.start()
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
    for part in (completions, chat, status, pages):
        app.include_router(part.router)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, seconds=config.body_timeout)
    if config.api_key is not None:
        app.add_middleware(ApiKey, key=config.api_key)
    app.add_middleware(RequestLog, metrics=metrics)
    return app
