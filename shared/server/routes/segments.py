"""``/v1/segments``: register, list and delete segments of context; find a chat's segments. Introduced in phase 9.1.

Invariant: an id follows from the content, so clients that register the same content share a segment.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from shared.server.answers.intake import Intake
from shared.server.bodies.segment_fields import RegisterRequest, SegmentContent
from shared.server.engine.client import EngineClient
from shared.server.errors import ErrorBody, invalid
from shared.tracks.segments.inquiry import Blend, Content, Find, Forget, Page, SegmentInfo, Use

POLL_SECONDS = 0.01  # seconds between two checks of whether segments have been computed

router = APIRouter()
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "no such segment"}}
IN_USE: dict[int | str, dict[str, Any]] = {409: {"model": ErrorBody, "description": "a request uses the segment"}}


class SegmentBody(BaseModel):
    """A segment. ``num_bytes`` of its keys and values are in the cache, 0 if it must be computed when it is used."""

    id: str
    object: str = "segment"
    role: str
    num_tokens: int
    num_bytes: int
    num_users: int

    @classmethod
    def of(cls, info: SegmentInfo) -> "SegmentBody":
        return cls(id=info.segment_id, **{name: value for name, value in vars(info).items() if name != "segment_id"})


class SegmentPage(BaseModel):
    """Segments, the least recently used first; ``has_more``: there are others after the last one, whose id is
    ``last_id``."""

    object: str = "list"
    data: list[SegmentBody]
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """A segment that was deleted."""

    id: str
    object: str = "segment.deleted"
    deleted: bool = True


@router.post("/v1/segments", summary="Register a segment of context")
async def register(request: Request, body: RegisterRequest) -> SegmentBody:
    """Its id; it is computed in the next steps. The same content has the same id and is computed once."""
    request.app.state.intake.check_model(body.model)
    (info,) = await context(request, [body], "content")
    return SegmentBody.of(info)


@router.get("/v1/segments", summary="List the registered segments")
async def list_segments(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> SegmentPage:
    """Up to `limit` segments, those after the segment with the id `after`."""
    infos, has_more = await _client(request, None).inquire(Page(limit, after), "after")
    data = [SegmentBody.of(info) for info in infos]
    return SegmentPage(data=data, last_id=data[-1].id if data else None, has_more=has_more)


@router.get("/v1/segments/{segment_id}", summary="Facts about a segment", responses=UNKNOWN)
async def get_segment(request: Request, segment_id: str) -> SegmentBody:
    return SegmentBody.of(await _client(request, "id").inquire(Find(segment_id), "id"))


@router.delete("/v1/segments/{segment_id}", summary="Delete a segment", responses={**UNKNOWN, **IN_USE})
async def delete_segment(request: Request, segment_id: str) -> Deleted:
    """Deletes the id, and the segment's keys and values; 409 while a request uses it or it is being computed."""
    await _client(request, "id").inquire(Forget(segment_id), "id")
    return Deleted(id=segment_id)


async def context(
    request: Request, segments: Sequence[str | SegmentContent], param: str, recompute: float | None = None
) -> list[SegmentInfo]:
    """The segments that a body names, in order; contents are registered. ``param`` is the field named in errors.

    With a fraction to ``recompute``: the single segment made of all of them, once each is computed.
    """
    if not segments:
        return []
    client, intake = _client(request, param), cast(Intake, request.app.state.intake)
    named = [
        one if isinstance(one, str) else Content(one.role, tuple(await intake.text_ids(one.content, param=param)))
        for one in segments
    ]
    found = cast("list[SegmentInfo]", await client.inquire(Use(tuple(named)), param))
    if recompute is None or len(found) == 1:
        return found
    blend = Blend(tuple(info.segment_id for info in found), recompute)
    while (blended := await client.inquire(blend, param)) is None:
        blend = replace(blend, is_again=True)
        await asyncio.sleep(POLL_SECONDS)
    return [blended]


def _client(request: Request, param: str | None) -> EngineClient:
    """The engine's client; raises ApiError if the engine has no segments, or if the server is shutting down."""
    intake: Intake = request.app.state.intake
    if (stopping := intake.stopping()) is not None:
        raise stopping
    if intake.facts.segment_refusal is not None:
        raise invalid(intake.facts.segment_refusal, param=param, code="no_segments")
    return cast(EngineClient, request.app.state.client)
