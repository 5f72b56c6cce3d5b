"""Field types of request bodies: prompts, stop strings, contents, fields with one valid value. Introduced in phase 4.

Each is a validator, which raises ValueError with the message of the API, and the equivalent JSON schema. Invariant: a
validator returns one canonical form, however the client wrote the value.
"""

import json
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from shared.sampling.params import SamplingParams
from shared.server.settings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

_TEXT = {"type": "string", "minLength": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 1},
    ]
}
_STOP_TEXT = {**_TEXT, "maxLength": MAX_STOP_CHARACTERS}
STOP_SCHEMA = {
    "anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]
}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}


class Only:
    """Marks a field that is accepted only with these values, which change nothing."""

    def __init__(self, *allowed: Any) -> None:
        self.allowed = allowed

    def judge(self, value: Any, info: ValidationInfo) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.allowed):
            known = " or ".join("null" if one is None else json.dumps(one) for one in self.allowed)
            raise ValueError(f"{info.field_name} is {short(value)}; this server accepts only {known}; or leave it out.")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self.judge, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.allowed)}


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def stop_texts(value: Any) -> tuple[str, ...]:
    """Stop strings from one text or a list of texts, within the limits."""
    texts = tuple([value] if isinstance(value, str) else value if isinstance(value, list) else [value])
    texts = () if value is None else texts
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"stop holds {len(texts)} strings; it may hold at most {MAX_STOP_STRINGS}.")
    if any(isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise ValueError(f"stop holds a string of more than {MAX_STOP_CHARACTERS} characters; shorten it.")
    return SamplingParams(stop=texts).stop


def content_text(value: Any) -> str:
    """The text of a message, given as a string or as parts of type text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"content is {short(value)}; it must be a text or a list of parts of type text.")
    for part in value:
        is_text = isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
        if not (is_text and isinstance(part["text"], str)):
            raise ValueError(f'content holds the part {short(part)}; a part must be {{"type": "text", "text": "..."}}.')
    return "".join(part["text"] for part in value)


def one_prompt(value: Any) -> str | list[int]:
    """A text or a list of token ids; a list with one prompt in it is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token_id) is int for token_id in value):
        return value
    if value in ("", []):
        raise ValueError("prompt is empty; give at least one character of text or one token id.")
    if isinstance(value, list) and all(isinstance(one, str | list) for one in value):
        raise ValueError(f"prompt holds {len(value)} prompts; send one prompt with each request.")
    raise ValueError(f"prompt is {short(value)}; it must be a text or a list of token ids.")
