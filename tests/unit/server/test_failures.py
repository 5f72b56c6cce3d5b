"""A request that fails, a slow engine, a dead one, and what a client reads of it."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.engine.output import StepOutput
from shared.errors import RankError
from shared.server.answers.answer_stream import AnswerStream
from shared.server.routes.completions import CompletionFrames
from tests.unit.server.echo import ENDLESS, POISON, EchoEngine, endless, serving
from tests.unit.server.exchange import completion, error_of, events, samples
from tests.waiting import wait_until


def test_a_request_that_fails_leaves_the_others_alone(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        prompts = ("ab", "cd", "a" + POISON)
        with ThreadPoolExecutor(3) as aside, engine.held():  # so that they share their steps
            answers = [
                aside.submit(client.post, "/v1/completions", json=completion(prompt, max_tokens=20))
                for prompt in prompts
            ]
            wait_until(lambda: running.app.state.client.num_open_requests == 3)
        *others, failed = (events(answer.result().text) for answer in answers)
        for prompt, frames in zip(prompts, others, strict=False):
            assert "".join(data["choices"][0]["text"] for _, data in frames) == prompt * 10
        (_, token), (name, data) = failed
        assert token["choices"][0]["text"] == "a"
        assert name == "error"
        assert data["error"]["message"] == "The request was poisoned."
        assert data["error"]["code"] == "engine_error"
        at_once = client.post("/v1/completions", json=completion(POISON))  # before there is any of its answer
        assert at_once.status_code == 500
        assert error_of(at_once) == data["error"]
        assert client.get("/debug/engine").json()["audit"] == []


def test_a_dead_engine_ends_every_stream_every_question_and_the_readiness(folder: Path) -> None:
    engine = endless(folder)
    with serving(engine) as running, running.client() as client, ThreadPoolExecutor(1) as aside:
        with (
            running.client() as other,
            client.stream("POST", "/v1/completions", json=completion(**ENDLESS)) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            with engine.held():
                asked = aside.submit(other.get, "/debug/memory")
                wait_until(lambda: bool(running.app.state.client._questions))
                engine.before_step = lambda: (_ for _ in ()).throw(RuntimeError("boom"))
            assert error_of(asked.result())["code"] == "engine_error"
            rest = "\n".join(lines)
        assert rest.count("event: error") == 1
        assert rest.count("event: done") == 0
        assert json.loads(rest.rpartition("data: ")[2])["error"]["code"] == "engine_error"
        health = client.get("/health")
        assert health.status_code == client.get("/health/live").status_code == 503
        assert health.json() == {
            "status": "the engine has stopped",
            "message": "The engine has stopped (RuntimeError: boom); restart the server.",
            "live": False,
            "ready": False,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage": 0.0,
        }
        found = samples(client)
        gauges = ("engine_alive", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        assert [found[f"infer:{name}{{}}"] for name in gauges] == [0, 0, 0, 0]
        assert found["infer:request_success_total{finished_reason=error}"] == 1
        for refused in (client.post("/v1/completions", json=completion()), client.get("/debug/engine")):
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "engine_stopped"


def test_a_lost_rank_ends_the_server_too(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.bug = RankError("Rank 1 is lost.")
    with serving(engine) as running, running.client() as client:
        assert client.post("/v1/completions", json=completion()).status_code == 500
        wait_until(lambda: running.server.has_lost_engine)
        assert (running.server.should_exit, running.app.state.client.crash) == (True, "Rank 1 is lost.")


@pytest.mark.parametrize("bad", ["!b", "a!b"], ids=["in the first frame", "in a later frame"])
def test_a_bug_in_formatting_is_that_answers_alone(bad: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    format_tokens = CompletionFrames.tokens

    def fail(self: CompletionFrames, choice: AnswerStream, outputs: Sequence[StepOutput]) -> bytes:
        assert all(output.text != "!" for output in outputs)
        return format_tokens(self, choice, outputs)

    monkeypatch.setattr(CompletionFrames, "tokens", fail)
    engine = endless(folder)
    with serving(engine) as running, running.client() as client, ThreadPoolExecutor(1) as aside:
        other = aside.submit(client.post, "/v1/completions", json=completion("ab", max_tokens=40))
        *tokens, (name, data) = events(client.post("/v1/completions", json=completion(bad, **ENDLESS)).text)
        assert [data["choices"][0]["text"] for _, data in tokens] == list(bad[: bad.index("!")])
        assert (name, data["error"]["code"]) == ("error", "internal_error")
        assert len(events(other.result().text)) == 41
        wait_until(lambda: not engine.running)
        assert client.get("/debug/engine").json()["num_open_requests"] == 0


def test_a_bug_in_a_whole_body_is_a_failure_of_the_server(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionFrames, "whole", lambda *_: 1 / 0)
    failed = client.post("/v1/completions", json=completion(stream=False))
    assert (failed.status_code, error_of(failed)["code"]) == (500, "internal_error")


@pytest.mark.parametrize("is_named", [False, True])
def test_openais_client_raises_what_ends_a_stream(is_named: bool, folder: Path) -> None:
    with serving(EchoEngine(folder), named_events=is_named) as running:
        client = running.openai()
        usage: Any = {"stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(model="echo", prompt="ab", max_tokens=4, stream=True, **usage))
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "abab"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4
        with pytest.raises(openai.APIError, match="The request was poisoned"):
            list(client.completions.create(model="echo", prompt="a" + POISON, stream=True))
        with pytest.raises(openai.InternalServerError, match="The request was poisoned"):
            client.completions.create(model="echo", prompt=POISON, stream=True)


def test_an_engine_that_says_nothing_any_more_has_still_crashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EchoEngine(folder)

    def fail() -> None:
        raise RuntimeError("the device is lost")

    with serving(engine) as running, running.client() as client:
        monkeypatch.setattr(engine, "step", lambda: (monkeypatch.setattr(engine, "load", fail), fail()))
        answer = client.post("/v1/completions", json={"model": "echo", "prompt": "hello"})
        assert '"code":"engine_error"' in answer.text
        assert client.get("/health").status_code == 503
        assert running.app.state.client.crash == "RuntimeError: the device is lost"
