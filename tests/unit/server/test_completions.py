"""Completions: events and chunks of a stream, prompts of token ids, stop strings, logprobs."""

from pathlib import Path
from typing import Any

import httpx

from shared.sampling.params import SamplingParams
from tests.unit.server.echo import EchoEngine, serving
from tests.unit.server.exchange import chat, completion, events

OPTIONS = {"include_usage": True}


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
