"""The gateway: reads a whole request, sends it to a replica, and relays the response. Follows phase 11.

It runs inside Ray Serve's HTTP proxy (:mod:`shared.deployment.ingress`). The proxy alone would stream a body to a
replica that is already chosen, so its router could not see the prompt; and it closes the connection when a replica
dies. The gateway reads the body first, and ends a broken stream with an error event.
Invariants: the API key, allowed hosts and body limits are checked before a replica is chosen; if a client disconnects,
its request is aborted in the engine; `/health` reports on all replicas together.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable

from fastapi import FastAPI, Request
from grpc.aio import AioRpcError
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from shared.deployment.affinity import prefix_keys
from shared.deployment.exchange import APPLICATION, REPLICAS, Exchange
from shared.server.errors import ApiError, install, overloaded
from shared.server.http.event_stream import disconnection
from shared.server.http.middleware import AllowedHosts, ApiKey, BodyLimit, RequestLog
from shared.server.http.sse import DONE, frame
from shared.server.metrics import ServerMetrics
from shared.server.settings import ServerConfig

SESSION_HEADER = "x-session-id"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
STATUS_SECONDS = 0.5
"""How long an answer of Ray Serve's controller about its replicas is reused, in seconds."""
SETTINGS_SECONDS = 2.0
"""How long the settings from a replica are reused before a replica is asked again, in seconds: an update may change
them."""
_FAILURES = (RayError, RayServeException, AioRpcError)
_log = logging.getLogger("infer.server")


class Gateway:
    """An ASGI application in front of all replicas; it gets the server's settings from one of them."""

    def __init__(self) -> None:
        handle = serve.get_deployment_handle(REPLICAS, APPLICATION, _check_exists=False)
        handle._init(_run_router_in_separate_loop=False)
        # Over gRPC, a message takes less than half as long as it does as a Ray object.
        handle = handle.options(_by_reference=False, request_serialization="pickle", response_serialization="pickle")
        self._exchange = handle.options(stream=True).exchange
        self._settings = handle.settings
        self._states: dict[str, int] = {}
        self._config: ServerConfig | None = None
        self._app = self._application(ServerConfig("infer"))
        self._asking: asyncio.Task[None] | None = None
        self._asked_states = self._asked_settings = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._config is None or time.monotonic() - self._asked_settings > SETTINGS_SECONDS:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_settings())
            if self._config is None:
                await asyncio.shield(self._asking)
        await self._app(scope, receive, send)

    def _application(self, config: ServerConfig) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        install(app)
        app.add_api_route("/health", self.health)
        app.add_api_route("/health/ready", self.health)
        app.add_api_route("/health/live", self.live)
        app.add_api_route("/metrics", self.metrics)
        app.add_api_route("/{path:path}", self.forward, methods=METHODS)
        app.add_middleware(
            BodyLimit, max_bytes=config.max_body_bytes, seconds=config.body_timeout, stopping=lambda: None
        )
        if config.api_key is not None:
            app.add_middleware(ApiKey, key=config.api_key)
        if config.allowed_hosts:
            app.add_middleware(AllowedHosts, hosts=config.allowed_hosts)
        app.add_middleware(RequestLog, metrics=ServerMetrics(config.model_name))
        return app

    async def forward(self, request: Request) -> Response:
        """Relay a replica's response."""
        if self._config is None:
            raise overloaded("No replica runs.", ServerConfig.retry_after, code="no_replica")
        body = await request.body()
        session = request.headers.get(SESSION_HEADER)
        return Relay(self._stream(_exchange(request, body, prefix_keys(body, session))))

    async def health(self) -> Response:
        """200 while at least one replica accepts requests, else 503."""
        states = await self._replica_states()
        num_running = states.get("RUNNING", 0)
        is_whole = num_running > 0 and num_running == sum(states.values())
        status = "ok" if is_whole else "degraded" if num_running else "no replica runs"
        content = {"status": status, "message": None, "live": True, "ready": num_running > 0, "replicas": states}
        return JSONResponse(content, 200 if num_running else 503)

    async def live(self) -> Response:
        """Always 200: the gateway itself needs no restart."""
        return JSONResponse({"live": True})

    async def metrics(self, request: Request) -> Response:
        """The metrics of every replica, with the label ``replica``."""
        num_running = (await self._replica_states()).get("RUNNING", 0)
        texts = await asyncio.gather(*(self._metrics_of(request, index) for index in range(num_running)))
        registry = CollectorRegistry()
        registry.register(Merged(dict(texts)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _metrics_of(self, request: Request, index: int) -> tuple[str, str]:
        """A replica's name and its exposition."""
        name, text = "", b""
        async for message in self._stream(_exchange(request, b"", (), index)):
            name = dict(message.get("headers", ())).get(b"x-replica", name.encode()).decode()
            text += message.get("body", b"")
        return name, text.decode()

    async def _stream(self, exchange: Exchange) -> AsyncIterator[Message]:
        """The messages of a replica; raises ApiError if the replica is lost or all are full."""
        retry_after = (self._config or ServerConfig("infer")).retry_after
        messages = self._exchange.remote(exchange)
        try:
            async for message in messages:
                yield message
        except BackPressureError as error:
            raise overloaded(
                "Every replica is full; send the request later.", retry_after, code="queue_full"
            ) from error
        except _FAILURES as error:
            said = "The replica that served this request was lost; send it again."
            raise overloaded(said, retry_after, code="replica_lost") from error
        finally:
            messages.cancel()

    async def _ask_settings(self) -> None:
        """Ask a replica for the settings, if there is one."""
        try:
            if (await self._replica_states()).get("RUNNING", 0):
                config = await self._settings.remote()
                if config != self._config:
                    self._config, self._app = config, self._application(config)
            elif not self._states:  # the application was removed
                self._config = None
        except _FAILURES:
            _log.exception("the settings are not known")
        self._asked_settings = time.monotonic()

    async def _replica_states(self) -> dict[str, int]:
        """The number of replicas in each state, such as RUNNING; empty if the application is not deployed."""
        if time.monotonic() - self._asked_states > STATUS_SECONDS:
            found = (await asyncio.to_thread(serve.status)).applications.get(APPLICATION)
            replicas = found.deployments.get(REPLICAS) if found is not None else None
            states = replicas.replica_states if replicas is not None else {}
            self._states = {str(state): count for state, count in states.items() if count}
            self._asked_states = time.monotonic()
        return self._states


class Relay(Response):
    """Relays a replica's messages; a stream that breaks off ends with its API's error event."""

    def __init__(self, messages: AsyncIterator[Message]) -> None:
        super().__init__()
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relaying = asyncio.create_task(self._relay(scope, receive, send))
        leaving = asyncio.create_task(disconnection(receive))
        try:
            await asyncio.wait((relaying, leaving), return_when=asyncio.FIRST_COMPLETED)
            if relaying.done():
                relaying.result()
        finally:
            for task in (relaying, leaving):
                task.cancel()
            await asyncio.gather(relaying, leaving, return_exceptions=True)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started, is_named = False, False
        try:
            async for message in self._messages:
                if message["type"] == "http.response.start":
                    is_started = True
                elif not is_named:
                    is_named = message.get("body", b"").startswith(b"event: ")
                await send(message)
        except ApiError as error:
            if not is_started:
                await error.response()(scope, receive, send)
                return
            event = frame(error.body(), "error") if is_named else frame(error.body()) + DONE
            await send({"type": "http.response.body", "body": event, "more_body": False})


class Merged:
    """A collector of the expositions of several replicas, by name; each sample gets the label ``replica``."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
        return merged.values()


def _exchange(request: Request, body: bytes, prefix: tuple[bytes, ...], index: int | None = None) -> Exchange:
    scope = request.scope
    record = scope["state"]["record"]
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"x-request-id", b"content-length")]
    headers += [(b"x-request-id", record.request_id.encode()), (b"content-length", str(len(body)).encode())]
    client = scope.get("client")
    return Exchange(
        scope["method"],
        scope["path"],
        scope["query_string"],
        headers,
        body,
        tuple(client) if client else None,
        prefix,
        index,
    )
