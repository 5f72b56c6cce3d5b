"""Chat: the stream, the whole body, logprobs, messages of several kinds."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.server.echo import LIMIT, EchoEngine, serving
from tests.unit.server.exchange import assert_refused, chat, completion, error_of, events


def test_chat_streams_as_openai_does(client: httpx.Client) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    frames = events(client.post("/v1/chat/completions", json=body).text)
    assert {name for name, _ in frames} == {None}
    *chunks, usage, done = [data for _, data in frames]
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    without = events(client.post("/v1/chat/completions", json=chat(stream=True)).text)
    assert all("usage" not in data for _, data in without[:-1])


def test_logprobs_of_chat(client: httpx.Client) -> None:
    body = chat(logprobs=True, top_logprobs=1)  # the sampled token is the most likely one in the first position only
    shown = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(shown) == 4
    assert set(shown[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert [[set(top) for top in one["top_logprobs"]] for one in shown] == [[{"token", "logprob", "bytes"}]] * 4
    assert [one["token"] == one["top_logprobs"][0]["token"] for one in shown] == [True, False, True, False]
    assert bytes(shown[0]["bytes"]).decode() == shown[0]["token"]
    bare = client.post("/v1/chat/completions", json=chat(logprobs=True)).json()["choices"][0]["logprobs"]
    assert bare["content"][0]["top_logprobs"] == []


def test_an_answer_can_be_sent_back_as_it_came(client: httpx.Client) -> None:
    message = client.post("/v1/chat/completions", json=chat()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "syst", "refusal": None}, "the beginning of the prompt"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}, message]
    again = client.post("/v1/chat/completions", json={**chat(), "messages": [*turns, {"role": "user", "content": "c"}]})
    assert again.status_code == 200
    plain = [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}]
    counts = [
        client.post("/v1/chat/completions", json={**chat(), "messages": messages}).json()["usage"]["prompt_tokens"]
        for messages in (turns[:2], plain)
    ]
    assert counts[0] == counts[1]


def test_a_model_without_a_chat_format_is_refused_by_name(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.model.config.family = "unheard"
    with serving(engine) as running, running.client() as client:
        response = client.post("/v1/chat/completions", json=chat())
        assert_refused(response, "model")
        assert str(Path.home()) not in response.text


TEXT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize("content", ["", "a text", TEXT, []], ids=repr)
def test_a_prediction_changes_no_answer(content: Any, client: httpx.Client) -> None:
    answers = [
        client.post("/v1/chat/completions", json=chat(prediction=prediction)).json()
        for prediction in (None, {"type": "content", "content": content})
    ]
    assert [answer["choices"] for answer in answers[:1]] == [answer["choices"] for answer in answers[1:]]
    assert answers[0]["usage"] == answers[1]["usage"]


@pytest.mark.parametrize(
    ("prediction", "status", "param", "told"),
    [
        ("a text", 422, "prediction", "prediction is 'a text'; "),
        ({}, 400, "prediction.type", "The field prediction.type is missing."),
        ({"type": "content"}, 400, "prediction.content", "The field prediction.content is missing."),
        ({"type": "other", "content": "a"}, 422, "prediction.type", "prediction.type is 'other'; input should be 'c"),
        ({"type": "content", "content": 5}, 422, "prediction.content", "content is 5; it must be a text or a list"),
        ({"type": "content", "content": [{"type": "image"}]}, 422, "prediction.content", "a part of the type 'image'"),
        ({"type": "content", "content": "a", "more": 1}, 422, "prediction.more", "The field prediction.more is unk"),
        (
            {"type": "content", "content": "x " * LIMIT},
            422,
            "prediction.content",
            f"at most {LIMIT - 1}, since",
        ),
    ],
)
def test_a_prediction_that_is_none_is_refused(
    prediction: Any, status: int, param: str, told: str, client: httpx.Client
) -> None:
    response = client.post("/v1/chat/completions", json=chat(prediction=prediction))
    assert_refused(response, param, told, status)


def test_an_answer_without_a_limit_may_take_all_that_fits(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.pool.request_capacity = 300
    with serving(engine, max_tokens=None, max_chat_tokens=None) as running, running.client("*/*") as client:
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            del body["max_tokens"]
            answer = client.post(path, json=body | {"ignore_eos": True}).json()
            assert answer["usage"]["total_tokens"] == 300, path
            assert answer["choices"][0]["finish_reason"] == "length", path


def test_completions_know_no_prediction(client: httpx.Client) -> None:
    body = completion(prediction={"type": "content", "content": "a"})
    assert error_of(client.post("/v1/completions", json=body))["code"] == "unknown_field"
