"""Chat: the stream, the whole body, logprobs, messages of several kinds."""

from pathlib import Path
from typing import Any

import httpx

from tests.unit.server.echo import EchoEngine, serving
from tests.unit.server.exchange import assert_refused, chat, completion


def test_an_answer_can_be_sent_back_as_it_came(client: httpx.Client) -> None:
    message = client.post("/v1/chat/completions", json=chat()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "syst", "refusal": None}, "the beginning of the prompt"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}, message]
    again = client.post("/v1/chat/completions", json={**chat(), "messages": [*turns, {"role": "user", "content": "c"}]})
    assert again.status_code == 200
    plain = [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]

    def answer(content: str | None) -> dict[str, Any]:
        return {"role": "assistant", "content": content}

    counts = [
        client.post("/v1/chat/completions", json={**chat(), "messages": messages}).json()["usage"]["prompt_tokens"]
        for messages in (turns[:2], plain, [*plain, answer("b")], [*plain, answer(None) | {"refusal": "b"}])
    ]
    assert counts[0] == counts[1]
    assert counts[2] == counts[3], "a refusal is a text"


def test_a_model_without_a_chat_format_is_refused_by_name(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.model.config.family = "unheard"
    with serving(engine) as running, running.client() as client:
        response = client.post("/v1/chat/completions", json=chat())
        assert_refused(response, "model")
        assert str(Path.home()) not in response.text


def test_a_capability_that_is_refused_is_refused_with_its_reason(folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    thinking: list[dict[str, Any]] = [{"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False)]
    with serving(EchoEngine(folder)) as running, running.client() as client:
        served = running.app.state.intake.chat
        served.tool_format = None
        served.refusals = {"tools": "No tools.", "thinking": "No thinking."}
        for fields, param, told in (
            *((fields, "chat_template_kwargs.enable_thinking", "No thinking.") for fields in thinking),
            ({"tools": tools}, "tools", "No tools."),
        ):
            assert_refused(client.post("/v1/chat/completions", json=chat(**fields)), param, told)
        for fields in ({}, {"tools": []}, {"chat_template_kwargs": {"enable_thinking": None}}):
            assert client.post("/v1/chat/completions", json=chat(**fields)).status_code == 200, fields
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["TemplateOptions"]["properties"]["enable_thinking"] == {"enum": [None]}
        assert schemas["ChatRequest"]["properties"]["tools"] == {"enum": [[], None]}
        served.refusals = {"chat": "No chat.", **served.refusals}
        told = "No chat. Without a chat template, use /v1/completions."
        for fields in ({}, {"tools": tools}, *thinking):
            assert_refused(client.post("/v1/chat/completions", json=chat(**fields)), "model", told)


TEXT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_an_answer_without_a_limit_may_take_all_that_fits(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.pool.request_capacity = 300
    with serving(engine, max_tokens=None, max_chat_tokens=None) as running, running.client("*/*") as client:
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            del body["max_tokens"]
            answer = client.post(path, json=body | {"ignore_eos": True}).json()
            assert answer["usage"]["total_tokens"] == 300, path
            assert answer["choices"][0]["finish_reason"] == "length", path
