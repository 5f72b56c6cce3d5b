"""Every refusal and failure as one body: ``{"error": {message, type, param, code}}``. Introduced in phase 4.

400 is for what is no request at all (malformed JSON, a missing field), 422 for a request that asks for something
impossible, 503 for one that may be sent again. Invariant: nothing leaves the server as an error in another shape,
FastAPI's own errors included.
"""

import http
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shared.errors import InferError, QueueFullError

_TYPES = {401: "authentication_error", 500: "server_error", 503: "overloaded_error"}
_CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_SHOWN = 60  # characters of a bad value that a message repeats


class ErrorDetail(BaseModel):
    """``param`` is the field at fault, dotted; ``code`` is stable and made for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An answer that is an error. The framework passes its own kind of exception on from wherever it is raised."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """ASCII JSON: a message may repeat what a client sent, and that need not be encodable."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, media_type="application/json")


def invalid(message: str, *, param: str | None, code: str = "invalid_value") -> ApiError:
    """422: understood, and impossible."""
    return ApiError(422, code, message, param=param)


def overloaded(message: str, retry_after: int, *, code: str) -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, code, message, headers={"Retry-After": str(retry_after)})


def engine_failure(message: str | None) -> ApiError:
    """500: the engine failed at this request."""
    return ApiError(500, "engine_error", message or "The engine failed at this request; the server's log says why.")


def refusal_error(refusal: InferError, *, param: str, retry_after: int) -> ApiError:
    """What an engine says against a request: 503 if the queue is full, else 422."""
    if isinstance(refusal, QueueFullError):
        return overloaded(str(refusal), retry_after, code="queue_full")
    return invalid(str(refusal), param=param)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found: the worst kind first, and of a kind the first."""
    malformed = [error for error in errors if _is_malformed(error)]
    first = (malformed or errors)[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return ApiError(400, "invalid_json", f"The body is not valid JSON ({reason}, at character {param}).")
    if param is None:
        return ApiError(
            400, "invalid_json", "The body must be a JSON object, sent with the header Content-Type: application/json."
        )
    if kind == "missing":
        return ApiError(400, "missing_field", f"The field {param} is missing.", param=param)
    if kind == "extra_forbidden":
        return invalid(
            f"The field {param} is not known here; leave it out. docs/API.md lists what there is.",
            param=param,
            code="unknown_field",
        )
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return invalid(str(cause), param=param)
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    said = first["msg"][:1].lower() + first["msg"][1:]
    return invalid(f"{param} is {shown}; {said}.", param=param)


def install(app: FastAPI) -> None:
    """Give every error of the application, the framework's included, the one shape."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        said = {
            400: "The body cannot be read as JSON.",
            404: f"There is nothing at {request.url.path}; docs/API.md lists what there is.",
            405: f"{request.url.path} does not know {request.method}; see the header Allow.",
            413: "The body is longer than this server takes.",
        }.get(status, f"{status} {http.HTTPStatus(status).phrase}.")
        return ApiError(status, _CODES.get(status, "http_error"), said, headers=error.headers).response()

    async def on_refusal(request: Request, error: Exception) -> Response:
        return invalid(str(error), param=None).response()

    async def on_bug(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal_error", "The server failed at this request; its log says why.").response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(InferError, on_refusal)
    app.add_exception_handler(Exception, on_bug)


def _is_malformed(error: Mapping[str, Any]) -> bool:
    return error["type"] in ("json_invalid", "missing") or len(error["loc"]) < 2
