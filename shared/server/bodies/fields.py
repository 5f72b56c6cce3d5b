"""Field types of request bodies: prompts, stop strings, contents, and fields with one valid value. Introduced in phase
4.

Each is a validator, which raises ValueError with the API's message, and the equivalent JSON schema. Invariant: a
validator returns one canonical form, however the client wrote the value.
"""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from shared.sampling.params import MAX_CACHE_SALT, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams
from shared.server.errors import UnsupportedValueError
from shared.server.settings import MAX_PROMPTS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS


class Strict(BaseModel):
    """A part of a body; unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def nullable(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def closed(required: Iterable[str] | None = None, **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with only these fields, by default all required."""
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


TOKEN_ID_PATTERN = "^(0|[1-9][0-9]*)$"
"""A token id as a key of a JSON object."""
_TEXT = {"type": "string", "minLength": 1}
TOKEN_ID_SCHEMA: dict[str, Any] = {"title": "Token id", "type": "integer", "minimum": 0}
"""A token id; :mod:`shared.server.http.description` adds the maximum."""
_IDS = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
PROMPTS_SCHEMA = {"anyOf": [_TEXT, _IDS, {**_SEVERAL, "items": _TEXT}, {**_SEVERAL, "items": _IDS}]}
STOP_IDS_SCHEMA = nullable({"type": "array", "items": TOKEN_ID_SCHEMA, "maxItems": MAX_STOP_TOKEN_IDS})
SEGMENT_CONTENT_SCHEMA: dict[str, Any] = {"anyOf": [_TEXT, _IDS]}
_BIAS = {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS}
LOGIT_BIAS_SCHEMA = nullable(
    {
        "type": "object",
        "patternProperties": {TOKEN_ID_PATTERN: _BIAS},
        "additionalProperties": False,
        "maxProperties": MAX_LOGIT_BIASES,
    }
)
_STOP_TEXT = {**_TEXT, "maxLength": MAX_STOP_CHARACTERS}
STOP_SCHEMA = {
    "anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]
}
CACHE_SALT_SCHEMA = nullable({**_TEXT, "maxLength": MAX_CACHE_SALT})
_PARTS: tuple[dict[str, Any], ...] = tuple(
    {"type": "object", "properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": ["type", kind]}
    for kind in ("text", "refusal")
)
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": list(_PARTS)}}]}
MESSAGE_CONTENT_SCHEMA = {"anyOf": [*CONTENT_SCHEMA["anyOf"], {"type": "null"}]}


class Only:
    """Marks a field that is accepted only with these values, which have no effect."""

    def __init__(self, *allowed: Any) -> None:
        self.allowed = allowed

    def judge(self, value: Any, info: ValidationInfo) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.allowed):
            known = " or ".join("null" if one is None else json.dumps(one) for one in self.allowed)
            said = f"{info.field_name} is {short(value)}; this server accepts only {known}; or leave it out."
            raise UnsupportedValueError(said)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self.judge, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.allowed)}


def optional(kind: str, **limits: float) -> WithJsonSchema:
    """The JSON schema of a number that may be null; the field's validator checks its limits."""
    return WithJsonSchema(nullable({"type": kind, **limits}))


def whole(value: Any) -> Any:
    """A number without a fraction, converted to an integer, since JSON and its schemas do not distinguish 1.0 from
    1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def wholes(value: Any) -> Any:
    """``whole`` for a list, and for a list of lists."""
    if isinstance(value, list) and not all(type(one) in (int, str) for one in value):
        return [wholes(one) for one in value]
    return whole(value)


Whole = Annotated[int, BeforeValidator(whole)]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def stop_texts(value: Any) -> tuple[str, ...]:
    """Stop strings from one text or a list of texts, within the limits."""
    texts = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"stop holds {len(texts)} strings; it may hold at most {MAX_STOP_STRINGS}.")
    if any(isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise ValueError(f"stop holds a string of more than {MAX_STOP_CHARACTERS} characters; shorten it.")
    return SamplingParams(stop=texts).stop


def content_text(value: Any) -> str:
    """The text of a message, a string or parts of one; labels of a part, such as ``cache_control``, are ignored."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"content is {short(value)}; it must be a text or a list of parts of type text.")
    return "".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise UnsupportedValueError(
            f"content holds a part of the type {short(kind)}; this server reads text alone, in parts of the type text."
        )
    text = part.get(kind) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(f'content holds the part {short(part)}; a part must be {{"type": "text", "text": "..."}}.')
    return text


def message_text(value: Any) -> str | None:
    """The text of a message; None if it has only tool calls."""
    return None if value is None else content_text(value)


def token_biases(value: Any) -> dict[int, Any] | None:
    """Biases by token id, from an object whose keys are the ids as text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias is {short(value)}; it must be an object of token ids and numbers.")
    for key in value:
        if not re.fullmatch(TOKEN_ID_PATTERN, key) or len(key) > 10:
            raise ValueError(f'logit_bias has the key {short(key)}; a key must be a token id, such as "11".')
    return {int(key): bias for key, bias in value.items()}


def prompt_list(value: Any) -> list[str | list[int]]:
    """The prompts, from a text, a list of token ids, or a list of either."""
    value = wholes(value)
    is_several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if is_several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"prompt holds {len(prompts)} prompts; it may hold at most {MAX_PROMPTS}.")
    if not all(isinstance(prompt, type(prompts[0])) for prompt in prompts):
        raise ValueError("prompt holds texts and lists of token ids; send them in two requests.")
    return [one_prompt(prompt, "prompt") for prompt in prompts]


def one_prompt(value: Any, field: str) -> str | list[int]:
    """One prompt, from the field with this name."""
    if value in ("", []):
        raise ValueError(f"{field} is empty; give at least one character of text or one token id.")
    is_ids = isinstance(value, list) and all(type(token_id) is int for token_id in value)
    if not (is_ids or isinstance(value, str)):
        several = ", or a list of prompts" if field == "prompt" else ""
        raise ValueError(f"{field} is {short(value)}; it must be a text or a list of token ids{several}.")
    return cast("str | list[int]", value)
