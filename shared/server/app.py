"""The application: an engine, the link to it, and the routes around them. Introduced in phase 4.

Invariant: what surrounds a route is, from outside, the log, the key, the limits of the body. So every refusal is
logged, and nobody without a key has a body read.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from shared.server import chat, completions, pages, status
from shared.server.engine_link import EngineLink
from shared.server.engine_loop import EngineHome
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


def make_app(home: EngineHome, config: ServerConfig) -> FastAPI:
    """The ASGI application that serves the engine that lives there; its lifespan starts and stops the engine's loop."""
    metrics = ServerMetrics(config.model_name)
    link = EngineLink(
        home,
        metrics,
        max_open_requests=home.config.max_batch_size + home.config.max_waiting_requests,
        max_unread_bytes=config.max_unread_bytes,
    )
    metrics.watch(lambda: link.load)
    intake = Intake(home, link, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        link.start()
        yield
        await link.stop()
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
    app.state.link = link
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
