"""Errors of the API, all with the body ``{"error": {message, type, param, code}}``. Introduced in phase 4.

400 is for a malformed request (invalid JSON, a missing field), 422 for an invalid value, and 503 for a request that may
be retried. Invariant: every error has this body, including FastAPI's.
"""

import http
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from shared.errors import ContextLengthError, InferError, QueueFullError, SegmentInUseError, UnknownSegmentError
from shared.server.settings import ServerConfig

_TYPES = {401: "authentication_error", 500: "server_error", 503: "overloaded_error"}
_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_REFUSALS: dict[type[InferError], tuple[int, str]] = {
    ContextLengthError: (422, "context_length_exceeded"),
    UnknownSegmentError: (404, "segment_not_found"),
    SegmentInUseError: (409, "segment_in_use"),
}
_SHOWN = 60  # maximum length in characters of an invalid value quoted in a message


class ErrorDetail(BaseModel):
    """``param`` is the path of the invalid field, with dots; ``code`` is a stable identifier for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class UnsupportedValueError(ValueError):
    """A value that other servers accept and this one does not support; raised by a field's validator."""


class ApiError(HTTPException):
    """An error response. It is an HTTPException so that it can be raised anywhere below FastAPI."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code, self.message, self.param = code, message, param

    def body(self) -> bytes:
        """ASCII JSON, since a message may quote client text that has no UTF-8 encoding."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    @property
    def openai_status(self) -> int:
        """The status that OpenAI's API uses for this error."""
        if self.code == "model_not_found":
            return 404
        return 400 if self.status_code == 422 else self.status_code

    def response(self, config: ServerConfig | None = None) -> Response:
        """``config`` decides which statuses are used; without one, those of this class."""
        status = self.openai_status if config is not None and config.openai_statuses else self.status_code
        return Response(self.body(), status, self.headers, media_type="application/json")


def unsupported(message: str, *, param: str | None) -> ApiError:
    """422: a field that the model, or this phase's engine, does not support."""
    return invalid(message, param=param, code="unsupported")


def invalid(message: str, *, param: str | None, code: str = "invalid_value") -> ApiError:
    """422: an invalid value."""
    return ApiError(422, code, message, param=param)


def overloaded(message: str, retry_after: int, *, code: str) -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, code, message, headers={"Retry-After": str(retry_after)})


def engine_failure(message: str | None) -> ApiError:
    """500: the engine failed to process this request."""
    return ApiError(500, "engine_error", message or "The engine failed to process this request; see the server's log.")


def refusal_error(refusal: InferError, *, param: str, retry_after: int, segment_field: str | None = None) -> ApiError:
    """The error for a request that the engine refuses: 503 if the queue is full, 404 or 409 for segments, and otherwise
    422.

    ``segment_field``: the field of a chat that named its segments; the error names it if there is no such segment.
    """
    if isinstance(refusal, QueueFullError):
        return overloaded(str(refusal), retry_after, code="queue_full")
    status, code = _REFUSALS.get(type(refusal), (422, "invalid_value"))
    if isinstance(refusal, UnknownSegmentError) and segment_field is not None:
        param, code = segment_field, code.replace("segment", segment_field.removesuffix("s"))  # chunks: the former name
    return ApiError(status, code, str(refusal), param)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error for pydantic's findings: the first malformed part or, if there is none, the first invalid value."""
    malformed = [error for error in errors if _is_malformed(error)]
    first = (malformed or errors)[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return ApiError(400, "invalid_json", f"The body is not valid JSON ({reason}, at character {param}).")
    if param is None:
        said = "The body must be a JSON object, sent with the header Content-Type: application/json."
        return ApiError(400, "invalid_json", said)
    if kind == "missing":
        return ApiError(400, "missing_field", f"The field {param} is missing.", param=param)
    if kind == "extra_forbidden":
        said = f"The field {param} is unknown; leave it out. docs/API.md lists the fields."
        return invalid(said, param=param, code="unknown_field")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return (unsupported if isinstance(cause, UnsupportedValueError) else invalid)(str(cause), param=param)
    value = first.get("input")
    shown = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return invalid(f"{param} is {shown}; {first['msg'][:1].lower()}{first['msg'][1:]}.", param=param)


def install(app: FastAPI) -> None:
    """Register handlers that give every error of the application this body, including FastAPI's own errors."""
    makers: dict[type[Exception], Callable[[Request, Any], ApiError]] = {
        ApiError: lambda request, error: error,
        RequestValidationError: lambda request, error: validation_error(error.errors()),
        HTTPException: _http_error,
        InferError: lambda request, error: invalid(str(error), param=None),
        Exception: lambda request, error: ApiError(
            500, "internal_error", "The server failed to process this request; see its log."
        ),
    }

    async def respond(make: Callable[[Request, Any], ApiError], request: Request, error: Exception) -> Response:
        return make(request, error).response(getattr(request.app.state, "config", None))

    for kind, make in makers.items():
        app.add_exception_handler(kind, partial(respond, make))


def _http_error(request: Request, error: HTTPException) -> ApiError:
    status = error.status_code
    said = {
        400: "The body cannot be read as JSON.",
        404: f"There is no route {request.url.path}; docs/API.md lists the routes.",
        405: f"{request.url.path} does not allow {request.method}; see the header Allow.",
        413: "The body is longer than this server allows.",
    }.get(status, f"{status} {http.HTTPStatus(status).phrase}.")
    headers = _allowed(request) if status == 405 else error.headers
    return ApiError(status, _CODES.get(status, "http_error"), said, headers=headers)


def _allowed(request: Request) -> dict[str, str]:
    """The methods of all routes with the request's path; Starlette names only those of the first route."""
    routes = [route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {"Allow": ", ".join(sorted({method for route in routes for method in route.methods}))}


def _is_malformed(error: Mapping[str, Any]) -> bool:
    return error["type"] in ("json_invalid", "missing") or len(error["loc"]) < 2
