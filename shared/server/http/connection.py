"""A client's connection, with limits that apply before there is a request: time, bytes, and number. Introduced in phase
4.

uvicorn limits the number of requests and the idle time between two of them. It limits the size of a head only with its
slower parser, so a client could hold a connection without a request, or send an endless head. Invariants: a connection
that serves no request is closed within ``head_timeout``; of the bytes outside a body, at most ``max_head_bytes`` plus
one socket read are kept; a refusal has the same body as any error, an ``X-Request-Id``, and a line in the log.
"""

import asyncio
import http
import logging
import uuid
from typing import Any

import httptools
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shared.server.errors import ApiError, overloaded
from shared.server.http.logs import log_event
from shared.server.metrics import ServerMetrics
from shared.server.settings import EXPOSED, ServerConfig


class Connection(HttpToolsProtocol):
    """One connection. A request's head is its request line and headers.

    The scope's state holds the transport, which a response may have to abort, and the connection, which writes the
    parts of a stream: ASGI has no message for either.
    """

    def __init__(self, *, limits: ServerConfig, metrics: ServerMetrics, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._metrics = metrics
        self._head_timer: asyncio.Handle | None = None  # while no request is being served
        self._is_in_head = False
        self._num_head_bytes = 0  # of the parsed request line and headers
        self._num_unparsed = 0  # bytes since the parser last reported anything
        self._refusal: ApiError | None = None
        self._cycles: list[RequestResponseCycle] = []  # number of requests; pipelined ones wait their turn
        self._read_timer: asyncio.TimerHandle | None = None  # set while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport, "connection": self}
        most = self._limits.max_connections
        if len(self.connections) > most:
            said = f"This server has {most} open connections, as many as it takes; try again later."
            self._refuse(overloaded(said, self._limits.retry_after, code="too_many_connections"))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)
        self._disconnect()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # there is nothing to upgrade to, so the request is served without an upgrade
        except httptools.HttpParserError:
            said = "The bytes received are no HTTP request: the request line, a header or the framing is malformed."
            self._refuse(self._refusal or ApiError(400, "invalid_http", said))
        else:
            if self._num_unparsed > self._limits.max_head_bytes:
                self._refuse(self._head_too_large())

    def pause_writing(self) -> None:
        super().pause_writing()
        # A stream ends its request after send_timeout; this is for the other responses.
        self._read_timer = self.loop.call_later(2 * self._limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    @property
    def is_writable(self) -> bool:
        """Whether the client is connected and reading: little of what was written earlier is still unsent."""
        return not self.flow.write_paused and not self.transport.is_closing()

    def write_part(self, part: bytes, *, is_chunked: bool) -> None:
        """Write a part of the current body, which has no announced length, as ASGI's ``send`` does."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None:
            self.cycle.message_event.set()  # a request waiting for its body checks whether the server is shutting down

    # Callbacks of the parser, which reports their exceptions as HttpParserError.

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = self._num_unparsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        most = self._limits.max_url_bytes
        if len(self.url) > most:
            said = f"The URL is longer than {most} bytes, the limit of this server."
            self._reject(ApiError(414, "url_too_long", said))
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_unparsed = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign, assignment]
        self._cycles = [*self._unanswered(), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request has already arrived
            self._start_timer()

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._reject(self._head_too_large())

    def _reject(self, error: ApiError) -> None:
        self._refusal = error
        raise error

    def _head_too_large(self) -> ApiError:
        said = f"The headers are longer than {self._limits.max_head_bytes} bytes, the limit of this server."
        return ApiError(431, "headers_too_large", said)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self._limits.head_timeout, self._out_of_time)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _out_of_time(self, num_turns: int = 2) -> None:
        """Close the connection; do so immediately if its last response is not being read.

        Bytes that arrived while the event loop was busy are read first, in one of the next ``num_turns`` iterations of
        the loop, so a slow server does not refuse requests. Timers fire before the sockets are read.
        """
        if num_turns:
            self._head_timer = self.loop.call_soon(self._out_of_time, num_turns - 1)
        elif self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._is_in_head:
            said = f"The headers did not arrive within {self._limits.head_timeout:g} seconds."
            self._refuse(ApiError(408, "headers_timeout", said))
        else:
            self.transport.close()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _disconnect(self) -> None:
        """Notify every request that its client is gone; uvicorn notifies only the last one."""
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self, error: ApiError) -> None:
        """Answer with ``error`` unless a response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        is_started = any(cycle.response_started for cycle in self._unanswered())
        self._disconnect()
        if not is_started:
            request_id = uuid.uuid4().hex
            self._metrics.on_http("other", error.status_code)
            log_event(
                logging.WARNING,
                "connection refused",
                request_id=request_id,
                client=self.client[0] if self.client else None,
                status=error.status_code,
                error=error.code,
            )
            self.transport.write(_http(error, request_id, self._readable_by()))
        self.transport.close()
        self._start_timer()  # for a client that does not read the response

    def _readable_by(self) -> bytes | None:
        """The site whose pages may read a refusal: the one in the Origin header or, if the header has not arrived, the
        only allowed one."""
        allowed = [origin.encode() for origin in self._limits.allowed_origins]
        if b"*" in allowed:
            return b"*"
        named = [value for name, value in self.headers or () if name == b"origin"] or allowed
        return named[0] if len(named) == 1 and named[0] in allowed else None


def _unchunked(cycle: RequestResponseCycle) -> Send:
    """The cycle's ``send`` for HTTP/1.0, which has no chunked encoding: a body without a length ends with the
    connection."""
    send, is_measured = cycle.send, True

    async def send_unchunked(message: Any) -> None:
        nonlocal is_measured
        if message["type"] == "http.response.start":
            is_measured = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not is_measured:
                cycle.chunked_encoding = False
        elif not is_measured:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


def _http(error: ApiError, request_id: str, origin: bytes | None) -> bytes:
    """The response as bytes, for a connection without a request; pages of ``origin`` may read it."""
    response = error.response()
    headers = [*response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    if origin is not None:
        headers += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
        headers.append((b"access-control-expose-headers", ", ".join(EXPOSED).encode()))
    head = b"".join(b"%b: %b\r\n" % header for header in headers)
    reason = http.HTTPStatus(error.status_code).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status_code, reason, head, error.body())
