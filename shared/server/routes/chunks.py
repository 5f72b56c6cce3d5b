"""``/v1/chunks``: register, list and delete chunks of context; and those of a chat. Introduced in phase 9.1.

Invariant: an id follows from the content, so clients that register the same content have the same chunk.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from shared.server.answers.intake import Intake
from shared.server.bodies.chunk_fields import ChunkContent, RegisterRequest
from shared.server.engine.client import EngineClient
from shared.server.errors import ErrorBody, invalid
from shared.tracks.segments.inquiry import Blend, ChunkInfo, Content, Find, Forget, Page, Use

POLL_SECONDS = 0.01  # from one question whether chunks are computed to the next

router = APIRouter()
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "no such chunk"}}
_IN_USE: dict[int | str, dict[str, Any]] = {409: {"model": ErrorBody, "description": "a request uses the chunk"}}


class ChunkBody(BaseModel):
    """A chunk. ``num_bytes`` of its keys and values are in the cache, 0 if it must be computed when it is used."""

    id: str
    object: str = "chunk"
    role: str
    num_tokens: int
    num_bytes: int
    num_users: int

    @classmethod
    def of(cls, info: ChunkInfo) -> "ChunkBody":
        return cls(id=info.chunk_id, **{name: value for name, value in vars(info).items() if name != "chunk_id"})


class ChunkPage(BaseModel):
    """Chunks, the least recently used first; ``has_more``: others follow the last, whose id is ``last_id``."""

    object: str = "list"
    data: list[ChunkBody]
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """A chunk that was deleted."""

    id: str
    object: str = "chunk.deleted"
    deleted: bool = True


@router.post("/v1/chunks", summary="Register a chunk of context")
async def register(request: Request, body: RegisterRequest) -> ChunkBody:
    """Its id; it is computed in the next steps. The same content has the same id and is computed once."""
    request.app.state.intake.check_model(body.model)
    (info,) = await context(request, [body], "content")
    return ChunkBody.of(info)


@router.get("/v1/chunks", summary="List the registered chunks")
async def list_chunks(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> ChunkPage:
    """Up to `limit` chunks, those behind the chunk with the id `after`."""
    infos, has_more = await _client(request, None).inquire(Page(limit, after), "after")
    data = [ChunkBody.of(info) for info in infos]
    return ChunkPage(data=data, last_id=data[-1].id if data else None, has_more=has_more)


@router.get("/v1/chunks/{chunk_id}", summary="What is known of a chunk", responses=UNKNOWN)
async def get_chunk(request: Request, chunk_id: str) -> ChunkBody:
    return ChunkBody.of(await _client(request, "id").inquire(Find(chunk_id), "id"))


@router.delete("/v1/chunks/{chunk_id}", summary="Delete a chunk", responses={**UNKNOWN, **_IN_USE})
async def delete_chunk(request: Request, chunk_id: str) -> Deleted:
    """The id, and the chunk's keys and values; 409 while a request uses it or it is being computed."""
    await _client(request, "id").inquire(Forget(chunk_id), "id")
    return Deleted(id=chunk_id)


async def context(
    request: Request, chunks: Sequence[str | ChunkContent], param: str, recompute: float | None = None
) -> list[ChunkInfo]:
    """The chunks that a body names, in its order; contents are registered. ``param`` is the field for errors.

    With a fraction to ``recompute`` the one chunk of them all, as soon as each of them is computed.
    """
    if not chunks:
        return []
    client, intake = _client(request, param), cast(Intake, request.app.state.intake)
    named = [
        one if isinstance(one, str) else Content(one.role, tuple(await intake.text_ids(one.content, param=param)))
        for one in chunks
    ]
    found = cast("list[ChunkInfo]", await client.inquire(Use(tuple(named)), param))
    if recompute is None or len(found) == 1:
        return found
    blend = Blend(tuple(info.chunk_id for info in found), recompute)
    while (blended := await client.inquire(blend, param)) is None:
        blend = replace(blend, is_again=True)
        await asyncio.sleep(POLL_SECONDS)
    return [blended]


def _client(request: Request, param: str | None) -> EngineClient:
    """The engine's client; raises ApiError if the engine has no chunks, or the server shuts down."""
    intake: Intake = request.app.state.intake
    if (stopping := intake.stopping()) is not None:
        raise stopping
    if intake.facts.chunk_refusal is not None:
        raise invalid(intake.facts.chunk_refusal, param=param, code="no_chunks")
    return cast(EngineClient, request.app.state.client)
