"""``/v1/chunks`` and a chat's field ``chunks``: the former names of segments, deprecated. Introduced in phase 9.1.

Invariant: clients of the former names get the objects and error codes that these names always had.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Query, Request

from shared.server.bodies.protocol import ChatRequest
from shared.server.bodies.segment_fields import RegisterRequest
from shared.server.errors import ApiError, invalid
from shared.server.routes import segments
from shared.server.routes.segments import Deleted, SegmentBody, SegmentPage
from shared.tracks.segments.inquiry import SegmentInfo

router = APIRouter(prefix="/v1/chunks", deprecated=True)


@router.post("", summary="Deprecated name of POST /v1/segments")
async def register(request: Request, body: RegisterRequest) -> SegmentBody:
    with _former_codes():
        return _chunk(await segments.register(request, body))


@router.get("", summary="Deprecated name of GET /v1/segments")
async def list_chunks(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> SegmentPage:
    with _former_codes():
        page = await segments.list_segments(request, limit, after)
    return page.model_copy(update={"data": [_chunk(segment) for segment in page.data]})


@router.get("/{chunk_id}", summary="Deprecated name of GET /v1/segments/ID", responses=segments.UNKNOWN)
async def get_chunk(request: Request, chunk_id: str) -> SegmentBody:
    with _former_codes():
        return _chunk(await segments.get_segment(request, chunk_id))


@router.delete(
    "/{chunk_id}",
    summary="Deprecated name of DELETE /v1/segments/ID",
    responses={**segments.UNKNOWN, **segments.IN_USE},
)
async def delete_chunk(request: Request, chunk_id: str) -> Deleted:
    with _former_codes():
        deleted = await segments.delete_segment(request, chunk_id)
    return deleted.model_copy(update={"object": "chunk.deleted"})


async def chat_context(request: Request, body: ChatRequest) -> list[SegmentInfo]:
    """A chat's segments, under either name. Raises ApiError, for example if both names are given."""
    if not body.chunks:
        return await segments.context(request, body.segments, "segments", body.recompute)
    if body.segments:
        raise invalid("chunks is the former name of segments, and both are given; leave chunks out.", param="chunks")
    with _former_codes():
        return await segments.context(request, body.chunks, "chunks", body.recompute)


def _chunk(segment: SegmentBody) -> SegmentBody:
    return segment.model_copy(update={"object": "chunk"})


@contextmanager
def _former_codes() -> Iterator[None]:
    """Raise errors with the codes of the old name."""
    try:
        yield
    except ApiError as error:
        code = error.code.replace("segment", "chunk")
        raise ApiError(error.status_code, code, error.message, error.param, error.headers) from None
