"""A chunk's content in a body, and the field ``chunks`` of a chat. Introduced in phase 9.1.

Invariant: an item of ``chunks`` is an id, or what ``POST /v1/chunks`` takes without ``model``.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictStr, ValidationError, WithJsonSchema

from shared.server.bodies.fields import CHUNK_CONTENT_SCHEMA, closed, nullable, one_prompt, short, wholes
from shared.server.settings import MAX_CHUNKS, MAX_ROLE_CHARACTERS

_ROLE: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_ROLE_CHARACTERS}
_CONTENT = closed(["content"], content=CHUNK_CONTENT_SCHEMA, role=_ROLE)
_MAX_ID = 80  # characters; our ids have 32
_ID = {"type": "string", "minLength": 1, "maxLength": _MAX_ID}
CHUNKS_SCHEMA = nullable({"type": "array", "items": {"anyOf": [_ID, _CONTENT]}, "maxItems": MAX_CHUNKS})


class ChunkContent(BaseModel):
    """A text or token ids; ``role`` is a part of the id and changes nothing else."""

    model_config = ConfigDict(extra="forbid")

    content: Annotated[Any, AfterValidator(lambda value: one_prompt(wholes(value), "content"))] = Field(
        json_schema_extra=CHUNK_CONTENT_SCHEMA
    )
    role: StrictStr = Field("user", min_length=1, max_length=MAX_ROLE_CHARACTERS)


class RegisterRequest(ChunkContent):
    """The body of ``POST /v1/chunks``."""

    model: StrictStr = Field(max_length=1024)


def chunk_list(value: Any) -> tuple[str | ChunkContent, ...]:
    """Ids and contents of chunks, in order."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"chunks is {short(value)}; it must be a list of ids and of objects with content.")
    if len(value) > MAX_CHUNKS:
        raise ValueError(f"chunks holds {len(value)} chunks; it may hold at most {MAX_CHUNKS}.")
    return tuple(_chunk(one) for one in value)


def _chunk(value: Any) -> str | ChunkContent:
    if isinstance(value, str) and 0 < len(value) <= _MAX_ID:
        return value
    if not isinstance(value, dict):
        raise ValueError(f"chunks holds {short(value)}; give the id of a chunk, or an object with content.")
    try:
        return ChunkContent(**{str(name): one for name, one in value.items()})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = first.get("ctx", {}).get("error") or f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}."
        raise ValueError(f"chunks holds {short(value)}; {said}") from None


FieldOfChunks = Annotated[Any, AfterValidator(chunk_list), WithJsonSchema(CHUNKS_SCHEMA)]
