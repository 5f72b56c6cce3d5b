"""Every field of every body, at every depth, with a value of every JSON type, and with those at the limits of its
schema and just beyond: an answer or a refusal, no failure."""

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic import ValidationError

from shared.server.bodies.fields import closed
from shared.server.bodies.protocol import ChatRequest, CompletionRequest
from shared.server.bodies.segment_fields import SEGMENTS_SCHEMA, RegisterRequest
from shared.server.errors import ApiError
from shared.server.http.json_text import MAX_KEYS, MAX_NESTING, MAX_VALUES, check_json
from tests.unit.server.echo import EchoEngine, serving
from tests.unit.server.exchange import assert_refused, chat, completion, error_of

VALUES: tuple[Any, ...] = (None, True, 1.0, -1.5, 10**30, "1", "x", [{}], {"x": []})
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
TEXT = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
COMMON: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 1,
    "n": 1,
    "temperature": 1,
    "top_p": 1,
    "top_k": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {"5": 1},
    "min_tokens": 0,
    "stop": ["y"],
    "stop_token_ids": [5],
    "seed": 1,
    "ignore_eos": False,
    "cache_salt": "s",
    "use_speculative_decoding": True,
    "thinking_budget": None,
    "min_thinking_tokens": 0,
    "grammar_progress": False,
    "stream": False,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
    "length_penalty": 1,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "priority": 0,
    "store": False,
    "service_tier": "auto",
    "user": "u",
    "metadata": {"a": "b"},
}
COMPLETION = COMMON | {
    "prompt": ["a", "b"],
    "logprobs": 1,
    "echo": True,
    "add_special_tokens": True,
    "best_of": 1,
    "suffix": "",
}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": TEXT, "name": "n"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ],
    "max_completion_tokens": 1,
    "logprobs": True,
    "top_logprobs": 1,
    "chat_template_kwargs": {"enable_thinking": None},
    "continue_final_message": False,
    "add_generation_prompt": True,
    "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
    "segments": [],
    "chunks": [],
    "recompute": 0.5,
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}}
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "reasoning_effort": None,
    "verbosity": None,
    "web_search_options": None,
    "prompt_cache_key": "k",
    "safety_identifier": "i",
}
NAMED = {"tools": CHAT["tools"], "tool_choice": {"type": "function", "function": {"name": "f"}}}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
        }
    },
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "regex", "pattern": "a"}},
    {"structured_outputs": {"choice": ["a"], "regex": None}},
    {"guided_json": SCHEMA},
    {"guided_regex": "a"},
    {"guided_choice": ["a"]},
)
BODIES: dict[str, tuple[str, tuple[tuple[dict[str, Any], dict[str, Any]], ...]]] = {
    "completions": ("/v1/completions", (({}, COMPLETION), *((completion(), more) for more in GRAMMARS))),
    "chat": ("/v1/chat/completions", ((COMMON, CHAT), (chat(), NAMED))),
    "segments": ("/v1/segments", (({}, {"model": "echo", "content": [1], "role": "user"}),)),
}
"""Path and bodies: what stays, and what is varied. COMMON and the fields of a grammar are the same in both routes."""


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Of a server that compiles grammars, and whose engine does not follow them."""
    engine = EchoEngine(folder)
    engine.constraints = None  # type: ignore[attr-defined]
    with serving(engine) as running, running.client("application/json") as client:
        yield client


Schemas = list[dict[str, Any]]


def alternatives(schemas: Schemas, known: dict[str, Any]) -> Schemas:
    """These schemas, and those that they refer to and choose from."""
    inner = [one for each in schemas for one in each.get("anyOf", ())]
    inner += [known[each["$ref"].rpartition("/")[2]] for each in schemas if "$ref" in each]
    return schemas + (alternatives(inner, known) if inner else [])


def of_field(schemas: Schemas, name: str | int) -> Schemas:
    """The schemas of a field or an item."""
    if isinstance(name, int):
        return [each["items"] for each in schemas if "items" in each]
    found = [each["properties"][name] for each in schemas if name in each.get("properties", ())]
    return found + [one for each in schemas for one in each.get("patternProperties", {}).values()]


def at_limits(schemas: Schemas, value: Any) -> Iterator[Any]:
    """Values at each limit, and just beyond it; ``value`` is a valid one."""
    for each in schemas:
        yield from (*each.get("enum", ()), *([each["const"]] if "const" in each else ()))
        for name, sign in (("minimum", -1), ("exclusiveMinimum", 1), ("maximum", 1)):
            if name in each:
                limit = int(each[name]) if each["type"] == "integer" else each[name]
                beyond = limit + sign if each["type"] == "integer" else math.nextafter(limit, sign * math.inf)
                yield from [limit, beyond][: 2 if math.isfinite(beyond) else 1]
        for name, length in (("minLength", -1), ("maxLength", 1)):
            yield from ["a" * each[name], "a" * (each[name] + length)] if name in each else ()
        for name, length in (("minItems", -1), ("maxItems", 1)):
            first = json.dumps(value[0]) if isinstance(value, list) and value else '"a"'
            for count in (each[name], each[name] + length) if name in each else ():
                yield [json.loads(first.replace('"f"', f'"f{number}"')) for number in range(count)]
        yield from ["a" * 64, "a" * 65, "Z_-9", "", "é", "a\n"] if "pattern" in each else ()
        yield from ({key: 0} for key in ("0", "511", "512", "01", "-1") if "patternProperties" in each)


def varied(body: Any, schemas: Schemas, known: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The body with each of its fields and items, at every depth, replaced or left out, or one more; and its path.

    Replaced by each of VALUES, and by the values at the limits of their ``schemas``.
    """
    if isinstance(body, dict):
        yield f"{path}.odd".lstrip("."), body | {"odd": 1}
        for name in body:
            yield f"{path}.{name}".lstrip("."), {other: field for other, field in body.items() if other != name}
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, field in inner:
        own = f"{path}.{name}" if path else str(name)
        theirs = alternatives(of_field(schemas, name), known)
        values = [(own, value) for value in (*VALUES, *at_limits(theirs, field))]
        for where, value in (*values, *varied(field, theirs, known, own)):
            changed = copy.copy(body)
            changed[name] = value
            yield where, changed


def test_every_field_is_varied() -> None:
    grammars = set().union(*GRAMMARS)
    assert set(COMPLETION) | grammars == set(CompletionRequest.model_fields), "a new field belongs into COMPLETION"
    assert set(COMMON) | set(CHAT) | grammars == set(ChatRequest.model_fields), "a new field belongs into CHAT"
    assert {"model", "content", "role"} == set(RegisterRequest.model_fields), "a new field belongs into BODIES"


UNDESCRIBED = (
    "add_generation_prompt",
    "messages",
    "messages.2.tool_calls.0.function.arguments",
    "messages.3.tool_call_id",
    "tool_choice",
)
"""Fields that other fields or their own text rule out, which no schema says."""
LATER = ("no_segments", "context_length_exceeded")
"""Codes of refusals of valid bodies, which name another field."""
RELATED = {
    ("continue_final_message", "add_generation_prompt"),
    ("logprobs", "top_logprobs"),
    ("n", "best_of"),
    ("response_format.json_schema", "response_format.schema"),
    *(("response_format.type", f"response_format.{name}") for name in ("json_schema", "pattern", "schema")),
    ("messages.2.tool_calls", "messages.3.tool_call_id"),
    ("messages.2.tool_calls.0.id", "messages.3.tool_call_id"),
    ("tools", "tool_choice"),
    ("tools.0.function.name", "tool_choice"),
}
"""A field whose value is refused because of another one, and that."""


@pytest.mark.parametrize("kind", BODIES)
def test_every_value_is_refused_by_its_field_unless_the_schema_allows_it(kind: str, client: httpx.Client) -> None:
    path, bodies = BODIES[kind]
    schemas = client.get("/openapi.json").json()["components"]
    name = {"completions": "CompletionRequest", "chat": "ChatRequest", "segments": "RegisterRequest"}[kind]
    schema = jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": schemas})
    for base, fields in bodies:
        if kind != "segments":
            assert client.post(path, json=base | fields).status_code == 200, f"{fields} is valid"
        for where, changed in varied(fields, [schemas["schemas"][name]], schemas["schemas"]):
            response = client.post(path, json=base | changed)
            assert response.status_code in (200, 400, 422), f"{changed}: {response.text}"
            fits = schema.is_valid(base | changed)
            if response.status_code == 200:
                assert fits, changed
                continue
            param, code = str(error_of(response)["param"]), error_of(response)["code"]
            if fits:
                assert code in (*LATER, "invalid_grammar") or param in UNDESCRIBED, (changed, response.text)
            related = (where, param) in RELATED or code in LATER
            parts = zip(where.split("."), param.split("."), strict=False)  # the field, a part of it, or what it is in
            assert related or all(ours == theirs for ours, theirs in parts), (where, response.text)


HALVES = [
    (completion("\ud800"), "prompt"),
    (completion("\ud83d\\\ude00"), "prompt"),
    (completion(user="a\udc00"), "user"),
    (completion(guided_choice=["a", "\ud800\ud83d\ude00"]), "guided_choice.1"),
    (completion(guided_json={"enum": ["\\\ud800"]}), "guided_json.enum.0"),
    (completion(metadata={"\ude00\ud83d": "a"}), "metadata.\ude00\ud83d"),
]


@pytest.mark.parametrize(("body", "param"), HALVES, ids=range(len(HALVES)))
@pytest.mark.parametrize("is_escaped", [True, False])
def test_half_of_a_surrogate_pair_is_refused_by_its_field(
    body: Any, param: str, is_escaped: bool, client: httpx.Client
) -> None:
    content = json.dumps(body, ensure_ascii=is_escaped).encode(errors="surrogatepass")
    headers = {"content-type": "application/json"}
    assert_refused(client.post("/v1/completions", content=content, headers=headers), param, "half of a surrogate pair")


def test_a_schema_as_text_has_no_half_of_a_pair_either(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json=completion(guided_json='{"enum": ["\\ud800"]}'))
    assert_refused(response, "guided_json", "half of a surrogate pair")


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud800", "\\\\", "\ud7ff\ue000\xed\xa0"])
def test_whole_characters_and_what_only_looks_like_half_of_one_are_accepted(text: str, client: httpx.Client) -> None:
    content = json.dumps(completion(text)).encode()
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text


def test_the_levels_of_a_body_are_bounded(client: httpx.Client) -> None:
    for depth, status in ((MAX_NESTING - 1, 422), (MAX_NESTING, 413), (100_000, 413)):
        content = b'{"model": "echo", "prompt": "[[", "response_format": %b%b}' % (b"[" * depth, b"]" * depth)
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == status, response.text
        assert error_of(response)["code"] == ("invalid_value" if status == 422 else "body_too_complex"), depth


BRACKETS = [
    (b"[%b]", b"0", MAX_VALUES),
    (b"[%b]", b"[]", MAX_VALUES // 2),
    (b"[[0,%b]]", b"{}", MAX_VALUES // 2 - 1),
    (b"{%b}", b'"":0', MAX_KEYS),
    (b'[[":"],{%b}]', b'":":":,"', MAX_KEYS),
]


@pytest.mark.parametrize(("body", "one", "most"), BRACKETS, ids=range(len(BRACKETS)))
def test_the_numbers_of_values_and_keys_are_bounded(body: bytes, one: bytes, most: int) -> None:
    """A list or an object is a value too, besides those that it holds."""
    check_json(body % b",".join([one] * most))
    with pytest.raises(ApiError, match="values"):
        check_json(body % b",".join([one] * (most + 1)))


def test_the_segments_of_a_chat_are_those_that_their_schema_allows() -> None:
    fields = {"segments": ["i", {"content": "a", "role": "user"}, {"content": "b"}]}
    schema = closed([], segments=SEGMENTS_SCHEMA)
    for _, changed in varied(fields, [schema], {}):
        refused = pytest.raises(ValidationError)
        with contextlib.nullcontext() if jsonschema_rs.is_valid(schema, changed) else refused:
            ChatRequest.model_validate(chat(**changed))
