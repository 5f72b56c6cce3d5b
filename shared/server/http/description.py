"""The OpenAPI description of one server: the schema of its request bodies, with the limits of the served model.

Introduced in phase 4. Invariant: a body that fits the schema is never refused with 422 for a field's value, and one
that does not fit always is. The only exception is the number of tokens in a text, which no schema can express.
"""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from shared.sampling.params import MAX_SEED
from shared.server.answers.intake import Intake
from shared.server.bodies.fields import TOKEN_ID_PATTERN, TOKEN_ID_SCHEMA

_ECHO_OR_TOKENS = (
    {"echo": {"const": True}},
    {"max_tokens": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}},
)
_BEST_OF_N = ({"best_of": {"type": "null"}}, {"best_of": {"const": 1}, "n": {"enum": [1, None]}})
_TOGETHER = [
    {"properties": {**tokens, **best}, **({"required": ["echo"]} if "echo" in tokens else {})}
    for tokens in _ECHO_OR_TOKENS
    for best in _BEST_OF_N
]
"""What fields of a completion allow only together. A larger ``best_of``, which must equal ``n``, is accepted too."""

_WITH_LOGPROBS = [
    {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
    {"properties": {"top_logprobs": {"enum": [0, None]}}},
]


_WITH_TOOLS = [
    {"properties": {"tool_choice": {"enum": ["none", "auto", None]}}},
    {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
]


_NO_SEGMENTS: dict[str, Any] = {"enum": [[], None]}
_ONE_NAME = [{"properties": {name: _NO_SEGMENTS}} for name in ("segments", "chunks")]


def describe(app: FastAPI, intake: Intake) -> None:
    """Make ``app.openapi`` describe the server of this model."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = plain()
            if intake.config.openai_statuses:
                for operation in (each for path in description["paths"].values() for each in path.values()):
                    operation["responses"].pop("422", None)
            schemas = description["components"]["schemas"]
            schemas["CompletionRequest"]["anyOf"] = _TOGETHER
            schemas["ChatRequest"]["allOf"] = [{"anyOf": _WITH_LOGPROBS}, {"anyOf": _WITH_TOOLS}, {"anyOf": _ONE_NAME}]
            for name in ("CompletionRequest", "ChatRequest"):
                _limit(schemas[name], intake)
            schemas["RegisterRequest"]["properties"]["model"] = {"const": intake.config.model_name}
            if intake.chat.tool_format is None:
                schemas["ChatRequest"]["properties"]["tools"] = {"enum": [[], None]}
            if not intake.facts.has_grammars:
                schemas["ChatRequest"]["properties"]["tool_choice"] = {"enum": ["none", "auto", None]}
            if intake.facts.segment_refusal is not None:
                schemas["ChatRequest"]["properties"] |= dict.fromkeys(("segments", "chunks"), _NO_SEGMENTS)
            if not intake.chat.has_thinking:
                values = [None] if "thinking" in intake.chat.refusals else [False, None]
                schemas["TemplateOptions"]["properties"]["enable_thinking"] = {"enum": values}
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _limit(schema: dict[str, Any], intake: Intake) -> None:
    """Add the limits of the model and its server to a body's schema, in place."""
    fields = schema["properties"]
    fields["model"] = {"const": intake.config.model_name}
    for node in _nodes(fields):
        if node.get("title") == TOKEN_ID_SCHEMA["title"]:
            node["maximum"] = intake.vocab_size - 1
        if TOKEN_ID_PATTERN in node:
            node[_pattern_below(intake.vocab_size)] = node.pop(TOKEN_ID_PATTERN)
    if not intake.facts.limits_thinking:
        fields["thinking_budget"] = {"const": None}
        fields["min_thinking_tokens"] = {"enum": [0, None]}
    fields["seed"]["anyOf"][0]["maximum"] = MAX_SEED  # FastAPI makes it a float, which is larger by one
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields:
            fields[name]["anyOf"][0]["maximum"] = intake.facts.max_seq_len


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in list(children):
        yield from _nodes(child)
    if isinstance(node, dict):
        yield node


def _pattern_below(limit: int) -> str:
    """A pattern for the numbers from 0 to ``limit`` - 1 in decimal, without leading zeros; ``limit`` is at least 2.

    The numbers below 305 are those with fewer digits, those that agree with 304 up to a digit that is smaller (1 or 2
    and any two digits, 30 and one of 0 to 3), and 304.
    """
    last = str(limit - 1)
    choices = ["0", f"[1-9][0-9]{{0,{len(last) - 2}}}"] if len(last) > 1 else ["0"]
    for index, digit in enumerate(last):
        lowest = 1 if index == 0 else 0
        if int(digit) > lowest:
            choices.append(f"{last[:index]}[{lowest}-{int(digit) - 1}][0-9]{{{len(last) - index - 1}}}")
    return f"^({'|'.join([*choices, last])})$"
