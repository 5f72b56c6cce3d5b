"""The status routes: models, health, metrics, and the engine between two steps. Introduced in phase 4.

Invariant: only the routes below `/debug`, which query the engine, wait for a step.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from shared.engine.memory_map import HoldingState
from shared.server.answers.intake import Intake
from shared.server.engine.client import EngineClient
from shared.server.errors import ApiError, ErrorBody, overloaded

DESCRIBE_TIMEOUT = 30.0
"""Seconds that `/debug/engine` and `/debug/memory` wait for the current step."""
router = APIRouter()
T = TypeVar("T")


class Model(BaseModel):
    """A model in OpenAI's format; ``max_model_len``, the longest sequence, is vLLM's addition.

    ``chat_template`` is the one in use: `builtin:NAME`, `checkpoint` or a file's name; null if chat is refused.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "infer"
    max_model_len: int
    chat_template: str | None


class ModelList(BaseModel):
    """The models of the server; always one."""

    object: str = "list"
    data: list[Model]


class Health(BaseModel):
    """``live``: no restart needed. ``ready``: the server accepts requests.

    ``message`` is a sentence if the engine has crashed, else null.
    """

    status: str
    message: str | None
    live: bool
    ready: bool
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float


class HoldingBody(BaseModel):
    """The KV cache blocks of one request. ``blocks`` is its block table; a preempted request has none.

    ``num_cached_tokens`` of its first tokens were in the KV cache when it was first admitted.
    """

    request_id: str
    state: HoldingState
    num_prompt_tokens: int
    num_tokens: int
    num_written: int
    num_cached_tokens: int
    blocks: list[int]


class MemoryBody(BaseModel):
    """The KV cache between two steps. ``written_share`` is that of the blocks in use; null if there are none.

    A block of several block tables is shared. ``cached`` are the blocks of prefixes that no request holds.
    """

    unit: str
    block_tokens: int
    num_blocks: int
    num_free: int
    written_share: float | None
    num_waiting: int
    num_preemptions: int
    holdings: list[HoldingBody]
    cached: list[int]


@router.get("/v1/models", summary="List the model")
async def list_models(request: Request) -> ModelList:
    return ModelList(data=[_model(request)])


@router.get("/v1/models/{name:path}", summary="The model", responses={404: {"model": ErrorBody}})
async def get_model(request: Request, name: str) -> Model:
    model = _model(request)
    if name != model.id:
        message = f"There is no model {name[:80]!r}; this server serves {model.id!r}."
        raise ApiError(404, "model_not_found", message, param="model")
    return model


@router.get("/health", summary="Whether the server accepts requests", responses={503: {"model": Health}})
async def health(request: Request) -> Response:
    """200 while the server accepts requests, else 503."""
    found = _health(request)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


@router.get("/health/live", summary="Whether the process is alive", responses={503: {"model": Health}})
async def live(request: Request) -> Response:
    """503 once the engine has crashed, since the server then needs a restart."""
    found = _health(request)
    return JSONResponse(found.model_dump(), 200 if found.live else 503)


@router.get("/health/ready", summary="Whether the server accepts requests", responses={503: {"model": Health}})
async def ready(request: Request) -> Response:
    """The same as `/health`."""
    return await health(request)


@router.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    text = request.app.state.metrics.exposition()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/debug/engine", summary="The engine between two steps")
async def engine(request: Request) -> dict[str, Any]:
    """Load, statistics, the last step, and the audit of the KV cache: empty when no request runs and nothing leaked."""
    client: EngineClient = request.app.state.client
    return {**await _between_steps(client.describe()), "num_open_requests": client.num_open_requests}


@router.get("/debug/memory", summary="The KV cache blocks of each request", responses={200: {"model": MemoryBody}})
async def memory(request: Request) -> Response:
    """The KV cache between two steps: its blocks, the request that owns each, and the preempted requests."""
    client: EngineClient = request.app.state.client
    return JSONResponse((await _between_steps(client.memory())).as_json())


async def _between_steps(answer: Awaitable[T]) -> T:
    """The engine's answer; raises ApiError if the current step takes too long."""
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT):
            return await answer
    except TimeoutError:
        said = f"The current step takes more than {DESCRIBE_TIMEOUT:g} s; try again."
        raise overloaded(said, 10, code="engine_busy") from None


def _model(request: Request) -> Model:
    intake: Intake = request.app.state.intake
    return Model(
        id=intake.config.model_name,
        created=int(request.app.state.started),
        max_model_len=intake.facts.max_seq_len,
        chat_template=intake.chat.format.name if intake.chat.format else None,
    )


def _health(request: Request) -> Health:
    client: EngineClient = request.app.state.client
    load, is_draining = client.load, request.app.state.intake.is_draining
    is_ready = client.is_alive and not is_draining
    status = "ok" if is_ready else "shutting down" if is_draining else "the engine has stopped"
    return Health(
        status=status,
        message=None if client.crash is None else f"The engine has stopped ({client.crash}); restart the server.",
        live=client.crash is None,
        ready=is_ready,
        num_requests_running=load.num_running,
        num_requests_waiting=load.num_waiting,
        kv_cache_usage=round(load.kv_usage, 4),
    )
