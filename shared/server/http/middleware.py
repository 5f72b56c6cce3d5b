"""Middleware: request ids, log, hosts, API key, body limits. Introduced in phase 4.

This is plain ASGI, since every frame of a stream passes through it. Invariant: every HTTP request is logged and counted
once, however it ends.
"""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.server.answers.answer import Answer
from shared.server.errors import ApiError
from shared.server.http.json_text import check_json
from shared.server.http.logs import log_event
from shared.server.metrics import ServerMetrics

REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
"""A valid `X-Request-Id` of a client; any other is replaced."""
_BIG = 2**15
_PORT = re.compile(r":\d*$")
_QUIET = ("health", "metrics", "page", "memory")
_GUARDED = ("/v1/", "/debug/")
_HANDLERS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat_completions",
    "/metrics": "metrics",
    "/debug/memory": "memory",
    "/": "page",
}
_PREFIXES = {
    "/v1/models": "models",
    "/v1/segments": "segments",
    "/v1/chunks": "chunks",
    "/health": "health",
    "/page/": "page",
    "/debug/": "debug",
}


@dataclass
class RequestRecord:
    """The data of a log line; routes add to it."""

    request_id: str
    path: str  # below the base path
    status: int = 499  # None if no response was started: the client disconnected first
    answer: Answer | None = None
    is_streaming: bool | None = None


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request with this scope."""
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


def handler_of(path: str) -> str:
    """The route's label in the metrics, from a small fixed set."""
    if path in _HANDLERS:
        return _HANDLERS[path]
    return next((name for prefix, name in _PREFIXES.items() if path.startswith(prefix)), "other")


class RequestLog:
    """Gives each request an id, logs it when it ends, and counts it.

    The request is counted before the last part of its response is sent, so a client that has read the response finds it
    counted.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, root_path: str = "") -> None:
        self.app, self.metrics, self.root_path = app, metrics, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(request_id, self._set_base(scope))
        scope.setdefault("state", {})["record"] = record
        handler, is_counted = handler_of(record.path), False

        async def send_with_id(message: Message) -> None:
            nonlocal is_counted
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [(name, self._below_root(name, value)) for name, value in message["headers"]]
                message["headers"] = [*headers, (b"x-request-id", record.request_id.encode())]
            elif not is_counted and not message.get("more_body", False):
                self.metrics.on_http(handler, record.status)
                is_counted = True
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            record.status = 500
            raise
        finally:
            if not is_counted:
                self.metrics.on_http(handler, record.status)
            _log_request(scope, record, handler, time.perf_counter() - started)

    def _below_root(self, name: bytes, value: bytes) -> bytes:
        """A redirect's target without the host, if there is a base path, since a proxy would add the path again."""
        if name != b"location" or not self.root_path:
            return value
        return urlsplit(value)._replace(scheme=b"", netloc=b"").geturl()

    def _set_base(self, scope: Scope) -> str:
        """Make the scope's path begin with the base path, which a proxy may keep or strip; returns the path below
        it."""
        root, path = self.root_path, str(scope["path"])
        below = path.removeprefix(root) if path.startswith(f"{root}/") else path
        scope["root_path"], scope["path"] = root, root + below
        return below


class ApiKey:
    """Refuses requests below ``/v1`` and ``/debug`` without the key; compares keys in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and record_of(scope).path.startswith(_GUARDED):
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key):
                said = "The API key is missing or wrong; send it as the header Authorization: Bearer KEY."
                error = ApiError(401, "invalid_api_key", said, headers={"WWW-Authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


class AllowedHosts:
    """Refuses requests whose ``Host`` header names none of ``hosts``; ``*.example.com`` names every subdomain.

    A page of another site can reach a server on this machine under its own name, which it resolves to 127.0.0.1; the
    header then shows that name. Starlette's TrustedHostMiddleware would refuse with plain text.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self.names = {host.lower() for host in hosts if not host.startswith("*.")}
        self.suffixes = tuple(host[1:].lower() for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or not self._allows(_PORT.sub("", given[0]).lower()):
                message = f"The header Host is {', '.join(given)[:80]!r}, which this server does not answer to."
                await ApiError(400, "invalid_host", message).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        return host in self.names or host.endswith(self.suffixes)


class BodyLimit:
    """Refuses a body that is too long, is too complex, or does not arrive in time.

    Starlette's own limit for an announced length answers in plain text, without the body of an API error.

    Parsing and validating a body hold Python's lock. A body of more than ``_BIG`` bytes waits for its own iteration of
    the event loop, so that other clients are served between two such bodies.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, stopping: Callable[[], ApiError | None]) -> None:
        self.app, self.max_bytes, self.seconds, self.stopping = app, max_bytes, seconds, stopping
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self.seconds
        num_bytes, pieces, is_complete = 0, list[bytes](), False

        async def receive_within_limits() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                said = f"The body did not arrive within {self.seconds:g} seconds."
                raise ApiError(408, "body_timeout", said, headers={"Connection": "close"}) from None
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self.max_bytes:
                raise self._too_large()
            is_complete = not message.get("more_body", False)
            if not is_complete and (stopping := self.stopping()) is not None:
                raise stopping
            if is_complete:
                if num_bytes > _BIG:
                    async with self._turn:
                        await asyncio.sleep(0)
                check_json(b"".join(pieces))
                pieces.clear()
            return message

        await self.app(scope, receive_within_limits, send)

    def _too_large(self) -> ApiError:
        said = f"The body is longer than {self.max_bytes} bytes, the limit of this server."
        return ApiError(413, "body_too_large", said, headers={"Connection": "close"})


def _log_request(scope: Scope, record: RequestRecord, handler: str, seconds: float) -> None:
    answer = record.answer
    fields: dict[str, object] = {"stream": record.is_streaming}
    if answer is not None:
        fields |= {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": answer.num_tokens,
            "finish_reason": answer.choices[0].finish_reason,
            "cause": answer.cause,
            "error": answer.error.code if answer.error is not None else None,
            "queue_s": _between(answer.choices[0].arrived, answer.earliest("scheduled")),
            "ttft_s": _between(answer.choices[0].arrived, answer.earliest("first_token")),
        }
    client = scope.get("client")
    log_event(
        logging.DEBUG if handler in _QUIET and record.status < 400 else logging.INFO,
        "request",
        request_id=record.request_id,
        client=client[0] if client else None,
        method=scope["method"],
        path=record.path,
        status=record.status,
        duration_s=round(seconds, 6),
        **fields,
    )


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
