"""Completions: events and chunks of a stream, prompts of token ids, stop strings, logprobs."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.sampling.params import SamplingParams
from tests.unit.server.echo import POISON, EchoEngine, Running, serving
from tests.unit.server.exchange import chat, completion, events

OPTIONS = {"include_usage": True}


def test_a_completion_streams_named_events_that_are_openai_chunks(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json=completion("ab", max_tokens=5))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    frames = events(response.text)
    assert [name for name, _ in frames] == ["token"] * 5 + ["done"]
    assert "".join(data["choices"][0]["text"] for _, data in frames) == "ababa"
    ids = {data["id"] for _, data in frames}
    assert len(ids) == 1
    for name, data in frames:
        assert data["object"] == "text_completion"
        assert data["model"] == "echo"
        assert isinstance(data["created"], int)
        assert data["choices"][0]["index"] == 0
        assert data["choices"][0]["logprobs"] is None
        assert (data["choices"][0]["finish_reason"] is None) == (name == "token")
    assert [data["token_id"] for _, data in frames[:-1]] == [frames[0][1]["token_id"], frames[1][1]["token_id"]] * 2 + [
        frames[0][1]["token_id"]
    ]
    done = frames[-1][1]
    assert done["token_id"] is None
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["completion_tokens"] == 5
    assert done["usage"]["total_tokens"] == done["usage"]["prompt_tokens"] + 5


def test_token_ids_are_a_prompt_and_a_list_of_one_is_that_one(client: httpx.Client) -> None:
    answers = []
    for prompt in ("ab", ["ab"], [65, 66], [[65, 66]]):
        frames = events(client.post("/v1/completions", json=completion(prompt)).text)
        answers.append((frames[-1][1]["usage"]["prompt_tokens"], "".join(d["choices"][0]["text"] for _, d in frames)))
    assert answers[0] == answers[1]
    assert answers[2] == answers[3] == (2, answers[2][1])


def test_a_stop_string_ends_the_answer_and_is_named(client: httpx.Client) -> None:
    for stop in ("c", ["zz", "c"]):
        frames = events(client.post("/v1/completions", json=completion("abc", max_tokens=9, stop=stop)).text)
        assert "".join(data["choices"][0]["text"] for _, data in frames) == "ab"
        assert frames[-1][1]["choices"][0]["finish_reason"] == "stop"
        assert frames[-1][1]["choices"][0]["stop_reason"] == "c"


@pytest.mark.parametrize("text", ['"\\\n\r\t\x00', "日本語 👩‍👩‍👧", "\u2028\u2029\x85data: x"])
def test_any_text_fits_into_a_frame(text: str, client: httpx.Client) -> None:
    frames = events(client.post("/v1/completions", json=completion(text, max_tokens=len(text.encode()))).text)
    assert "".join(data["choices"][0]["text"] for _, data in frames) == text


def test_logprobs_of_completions(client: httpx.Client) -> None:
    frames = events(client.post("/v1/completions", json=completion("ab", logprobs=2)).text)
    shown = [data["choices"][0]["logprobs"] for name, data in frames if name == "token"]
    assert [one["tokens"] for one in shown] == [["a"], ["b"], ["a"], ["b"]]
    assert [one["token_logprobs"] for one in shown] == [[-0.5]] * 4
    assert [one["text_offset"] for one in shown] == [[0], [1], [2], [3]]
    assert shown[0]["top_logprobs"] == [{"a": -1.0, "b": -2.0}]
    frames = events(client.post("/v1/completions", json=completion("ac", logprobs=1)).text)
    assert frames[1][1]["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.0, "c": -0.5}], "k + 1 with the sampled"


def test_a_streamed_completion_has_openais_frames(client: httpx.Client) -> None:
    """It asks with `stream`, so that its `Accept` says nothing."""
    body = completion(stream=True, stream_options={"include_usage": True})
    frames = events(client.post("/v1/completions", json=body).text)
    assert [name for name, _ in frames] == [None] * 7
    assert [data["token_id"] is not None for _, data in frames[:5]] == [True] * 4 + [False]
    assert [data["usage"] for _, data in frames[:5]] == [None] * 5
    assert frames[4][1]["choices"][0]["finish_reason"] == "length"
    assert frames[5][1]["choices"] == []
    assert frames[5][1]["usage"]["completion_tokens"] == 4
    assert frames[6][1] == "[DONE]"
    frames = events(client.post("/v1/completions", json=completion(stream=True)).text)
    assert all("usage" not in data for _, data in frames[:-1])
    frames = events(client.post("/v1/completions", json=completion("a" + POISON, stream=True)).text)
    assert frames[0][1]["choices"][0]["text"] == "a"
    assert [data if data == "[DONE]" else set(data) for _, data in frames[1:]] == [{"error"}, "[DONE]"]


def test_a_completion_is_one_body_that_says_what_its_stream_says(client: httpx.Client) -> None:
    body = completion("abc", max_tokens=9, stop="c", logprobs=2)
    frames = [data["choices"][0] for _, data in events(client.post("/v1/completions", json=body).text)]
    response = client.post("/v1/completions", json={**body, "stream": False})
    assert response.headers["content-type"] == "application/json"
    whole = response.json()
    (choice,) = whole["choices"]
    assert whole["object"] == "text_completion"
    assert choice["text"] == "".join(one["text"] for one in frames) == "ab"
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", "c")
    for name, values in choice["logprobs"].items():
        assert values == [one["logprobs"][name][0] for one in frames[:-1]]
    assert whole["usage"]["completion_tokens"] == len(frames) - 1
    assert client.post("/v1/completions", json=completion(POISON, stream=False)).status_code == 500


@pytest.mark.parametrize(
    ("accept", "stream", "kind"),
    [
        ("*/*", None, "body"),
        ("application/json", None, "body"),
        ("text/*", None, "body"),
        ("text/event-stream", None, "named"),
        ("application/json;q=0.5, Text/Event-Stream;q=0.9", None, "named"),
        ("text/event-stream", False, "body"),
        ("text/event-stream", True, "unnamed"),
        ("*/*", True, "unnamed"),
        ("application/json", True, "unnamed"),
    ],
)
def test_stream_and_accept_choose_the_response(accept: str, stream: bool | None, kind: str, echo: Running) -> None:
    for fields in [{}, {"stream": None}] if stream is None else [{"stream": stream}]:
        with echo.client(accept) as client:
            assert kind_of(client.post("/v1/completions", json=completion(**fields))) == kind


def test_named_events_can_be_the_answer_to_every_completion(folder: Path) -> None:
    with serving(EchoEngine(folder), named_events=True) as running, running.client("*/*") as client:
        for fields in ({}, {"stream": True}, {"stream": False}, {"stream": True, "stream_options": OPTIONS}):
            response = client.post("/v1/completions", json=completion(**fields))
            assert kind_of(response) == "named"
            assert [name for name, _ in events(response.text)] == ["token"] * 4 + ["done"]
        assert kind_of(client.post("/v1/chat/completions", json=chat())) == "body", "chat has no other form"


def kind_of(response: httpx.Response) -> str:
    if response.headers["content-type"] == "application/json":
        return "body"
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return "unnamed" if events(response.text)[-1] == (None, "[DONE]") else "named"


def test_the_models_sampling_settings_apply_where_a_request_is_silent(folder: Path) -> None:
    engine, seen = EchoEngine(folder), []
    take = engine.add_request

    def keep(prompt: Any, params: SamplingParams, request_id: str | None = None) -> str:
        seen.append((params.temperature, params.top_k, params.top_p))
        return take(prompt, params, request_id)

    engine.add_request = keep  # type: ignore[method-assign]
    with serving(engine, sampling_defaults={"temperature": 0.6, "top_k": 20}) as running, running.client() as client:
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            for fields in ({}, {"temperature": None, "top_p": 0.5}, {"temperature": 0, "top_k": -1}):
                assert client.post(path, json=body | fields).status_code == 200, (path, fields)
    assert seen == [(0.6, 20, 1.0), (0.6, 20, 0.5), (0.0, None, 1.0)] * 2, "a limit that is lifted stays lifted"
