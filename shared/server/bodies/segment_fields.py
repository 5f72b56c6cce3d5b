"""A segment's content in a body, and the field ``segments`` of a chat, formerly ``chunks``. Introduced in phase 9.1.

Invariant: an item of ``segments`` is either an id or a body of ``POST /v1/segments`` without ``model``.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictStr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from shared.server.bodies.fields import SEGMENT_CONTENT_SCHEMA, closed, nullable, one_prompt, short, wholes
from shared.server.settings import MAX_ROLE_CHARACTERS, MAX_SEGMENTS

_ROLE: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_ROLE_CHARACTERS}
_CONTENT = closed(["content"], content=SEGMENT_CONTENT_SCHEMA, role=_ROLE)
_MAX_ID = 80  # in characters; our own ids have 32
_ID = {"type": "string", "minLength": 1, "maxLength": _MAX_ID}
SEGMENTS_SCHEMA = nullable({"type": "array", "items": {"anyOf": [_ID, _CONTENT]}, "maxItems": MAX_SEGMENTS})


class SegmentContent(BaseModel):
    """A text or token ids; ``role`` is part of the id and changes nothing else."""

    model_config = ConfigDict(extra="forbid")

    content: Annotated[Any, AfterValidator(lambda value: one_prompt(wholes(value), "content"))] = Field(
        json_schema_extra=SEGMENT_CONTENT_SCHEMA
    )
    role: StrictStr = Field("user", min_length=1, max_length=MAX_ROLE_CHARACTERS)


class RegisterRequest(SegmentContent):
    """The body of ``POST /v1/segments``."""

    model: StrictStr = Field(max_length=1024)


def segment_list(value: Any, info: ValidationInfo) -> tuple[str | SegmentContent, ...]:
    """Ids and contents of segments, in order."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"{info.field_name} is {short(value)}; it must be a list of ids and of objects with content.")
    if len(value) > MAX_SEGMENTS:
        raise ValueError(f"{info.field_name} holds {len(value)} segments; it may hold at most {MAX_SEGMENTS}.")
    return tuple(_segment(one, info.field_name) for one in value)


def _segment(value: Any, field: str | None) -> str | SegmentContent:
    if isinstance(value, str) and 0 < len(value) <= _MAX_ID:
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{field} holds {short(value)}; give the id of a segment, or an object with content.")
    try:
        return SegmentContent(**{str(name): one for name, one in value.items()})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first.get("ctx", {}).get("error") or f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}."
        raise ValueError(f"{field} holds {short(value)}; {said}") from None


FieldOfSegments = Annotated[Any, AfterValidator(segment_list), WithJsonSchema(SEGMENTS_SCHEMA)]
FormerFieldOfSegments = Annotated[
    Any, AfterValidator(segment_list), WithJsonSchema({**SEGMENTS_SCHEMA, "deprecated": True})
]
