"""``infer serve`` and structured output: OpenAI's client as its documentation uses it, and answers that are valid."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients.structured_clients import instructed, langchain
from tests.integration.server_process import MODEL, ServerProcess

SETTINGS: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "temperature": 1.2}
QUESTION: Any = [{"role": "user", "content": "Answer."}]
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["id", "tags"],
    "additionalProperties": False,
}


class Step(BaseModel):
    kind: Literal["add", "multiply"]
    number: int = Field(ge=0, le=99)


class Plan(BaseModel):
    title: str = Field(max_length=8)
    steps: list[Step] = Field(max_length=2)
    note: str | None = Field(max_length=4)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    running = ServerProcess(folder, tmp_path_factory.mktemp("structured") / "log")
    yield running
    running.wait_until_idle()
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


def test_a_pydantic_model_is_parsed(server: ServerProcess) -> None:
    parsed = 0
    for seed in range(4):
        answer = (
            server.openai()
            .chat.completions.parse(**SETTINGS, messages=QUESTION, response_format=Plan, seed=seed)
            .choices[0]
        )
        assert answer.finish_reason == "stop"
        assert isinstance(answer.message.parsed, Plan)
        parsed += len(answer.message.parsed.steps)
    assert parsed > 0


def test_streams_and_requests_side_by_side(server: ServerProcess) -> None:
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "row", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "schema": SCHEMA},
    ]
    chat = server.openai().chat.completions
    streams = [
        chat.create(**SETTINGS, messages=QUESTION, response_format=formats[n % 2], seed=n, stream=True)
        for n in range(6)
    ]
    for stream in streams:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text
    extra = {"structured_outputs": {"json": SCHEMA}}
    whole = server.openai().completions.create(**SETTINGS, prompt="Row:", n=3, extra_body=extra, seed=1)
    for choice in whole.choices:
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(choice.text)), choice.text


class Weather(BaseModel):
    """The weather of a place."""

    place: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=14)


def test_tools_of_openais_client(server: ServerProcess) -> None:
    chat = server.openai().chat.completions
    asked: Any = {**SETTINGS, "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required", "seed": 1}
    parsed = chat.parse(**asked, messages=QUESTION).choices[0]
    assert parsed.finish_reason == "tool_calls"
    (call,) = parsed.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with chat.stream(**asked, messages=QUESTION) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(streamed.function.parsed_arguments, Weather)
    assert streamed.function.arguments == call.function.arguments
    turns = [*QUESTION, parsed.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    answer = chat.create(**asked | {"tool_choice": "none"}, messages=turns).choices[0]
    assert answer.message.tool_calls is None


@pytest.mark.parametrize(("package", "ask"), [("langchain_openai", langchain), ("instructor", instructed)])
def test_clients_that_build_on_openais(package: str, ask: Any, server: ServerProcess) -> None:
    pytest.importorskip(package, reason=f"the package {package} is not installed; it is no dependency")
    assert ask(server.url, MODEL)
