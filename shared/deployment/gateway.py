"""The gateway: reads a request whole, sends it to a replica, and relays the response. Follows phase 11.

Ray Serve's proxy streams a body to the replica that it has chosen, so its router cannot see the prompt; and when a
replica dies it closes the connection. The gateway reads the body first, and ends a broken stream with an error event.
Invariants: the key, the hosts and the limits of the body are checked before a replica is chosen; a client that
disconnects ends its request in the engine; `/health` speaks for all replicas.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.deployment.affinity import prefix_keys
from shared.deployment.exchange import Exchange
from shared.server.errors import ApiError, install, overloaded
from shared.server.metrics import ServerMetrics
from shared.server.middleware import AllowedHosts, ApiKey, BodyLimit, RequestLog
from shared.server.settings import ServerConfig
from shared.server.sse import DONE, frame

APPLICATION = "infer"
REPLICAS = "Replica"
SESSION_HEADER = "x-session-id"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
STATUS_SECONDS = 0.5
"""How long an answer of Ray Serve's controller about its replicas is used again."""


@serve.ingress()
class Gateway:
    """Ray Serve's ingress; ``replicas`` is the handle of the :class:`shared.deployment.replica.Replica` deployment."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig) -> None:
        self._replicas = replicas.options(stream=True).exchange
        self._config = config
        self._states: dict[str, int] = {}
        self._asked = -STATUS_SECONDS

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray Serve's name
        config = self._config
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
        app.add_middleware(ProxyNamesRequests)
        return app

    async def forward(self, request: Request) -> Response:
        """The response of a replica."""
        body = await request.body()
        session = request.headers.get(SESSION_HEADER)
        return Relay(self._stream(_exchange(request, body, prefix_keys(body, session))), self._config.retry_after)

    async def health(self) -> Response:
        """200 while at least one replica accepts requests, else 503."""
        states = await self._replica_states()
        num_running = states.get("RUNNING", 0)
        is_whole = num_running > 0 and num_running == sum(states.values())
        status = "ok" if is_whole else "degraded" if num_running else "no replica runs"
        content = {"status": status, "message": None, "live": True, "ready": num_running > 0, "replicas": states}
        return JSONResponse(content, 200 if num_running else 503)

    async def live(self) -> Response:
        """200: the gateway itself needs no restart."""
        return JSONResponse({"live": True})

    async def metrics(self, request: Request) -> Response:
        """The metrics of every replica, with the label ``replica``."""
        num_running = (await self._replica_states()).get("RUNNING", 0)
        texts = await asyncio.gather(*(self._metrics_of(request, index) for index in range(num_running)))
        registry = CollectorRegistry()
        registry.register(Merged(dict(texts)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _metrics_of(self, request: Request, index: int) -> tuple[str, str]:
        """The name of a replica and its exposition."""
        name, text = "", b""
        async for message in self._stream(_exchange(request, b"", (), index)):
            name = dict(message.get("headers", ())).get(b"x-replica", name.encode()).decode()
            text += message.get("body", b"")
        return name, text.decode()

    async def _stream(self, exchange: Exchange) -> AsyncIterator[Message]:
        """The messages of a replica; raises ApiError if it is lost."""
        messages = self._replicas.remote(exchange)
        try:
            async for message in messages:
                yield message
        except (RayError, RayServeException) as error:
            said = "The replica that served this request was lost; send it again."
            raise overloaded(said, self._config.retry_after, code="replica_lost") from error
        finally:
            messages.cancel()

    async def _replica_states(self) -> dict[str, int]:
        """How many replicas are in which state, such as RUNNING."""
        if time.monotonic() - self._asked > STATUS_SECONDS:
            found = await asyncio.to_thread(serve.status)
            replicas = found.applications[APPLICATION].deployments[REPLICAS]
            self._states = {str(state): count for state, count in replicas.replica_states.items() if count}
            self._asked = time.monotonic()
        return self._states


class ProxyNamesRequests:
    """Leaves the header `X-Request-Id` of a response to Ray Serve's proxy, which adds the same one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            await send(message)

        await self.app(scope, receive, send_unnamed)


class Relay(Response):
    """Sends a replica's messages on; a stream that breaks off ends with the error event of its API."""

    def __init__(self, messages: AsyncIterator[Message], retry_after: int) -> None:
        super().__init__()
        self._messages = messages
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relaying = asyncio.create_task(self._relay(scope, receive, send))
        leaving = asyncio.create_task(_disconnection(receive))
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


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
