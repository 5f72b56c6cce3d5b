"""Several choices of one answer: `n`, lists of prompts, and prompts that are given back."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import QueueFullError
from shared.server.answers.intake import derived_seed
from tests.unit.server.echo import ENDLESS, POISON, EchoEngine, Running, endless, serving, unread
from tests.unit.server.exchange import assert_refused, chat, completion, error_of, events
from tests.waiting import PATIENCE, wait_until

PATHS = ["/v1/completions", "/v1/chat/completions"]


def whole(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=completion(stream=False, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def test_without_a_limit_each_answer_has_the_room_after_the_longest_prompt(folder: Path) -> None:
    """In a sequence, and in the KV cache."""
    for most, capacity in ((40, 50), (40, 36)):
        engine = EchoEngine(folder, max_seq_len=most)
        engine.pool.request_capacity = capacity
        with serving(engine, max_tokens=None) as running, running.client("*/*") as client:
            usage = whole(client, prompt=[[69] * 30, [69], [69] * 20], max_tokens=None)["usage"]
            assert usage["completion_tokens"] == 3 * (min(most, capacity) - 30)
            full = client.post("/v1/completions", json=completion([69] * min(most, capacity), max_tokens=None))
            assert error_of(full)["code"] == "context_length_exceeded"


LONG = "ab" * 2**13 + "c"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
DEFINED = {"type": "function", "function": {"name": "f", "description": LONG}}


@pytest.mark.parametrize(
    "body",
    [
        completion(LONG),
        chat(LONG),
        chat(tools=[DEFINED]),
        chat() | {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
    ],
    ids=["prompt", "content", "tools", "arguments"],
)
def test_a_long_text_that_is_tokenized_delays_no_short_one(body: dict[str, Any], folder: Path) -> None:
    engine, has_begun, may_end = EchoEngine(folder, max_seq_len=2**20), threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def waiting(text: str, **options: Any) -> list[int]:
        if len(text) > 2**14:
            has_begun.set()
            may_end.wait(PATIENCE)
        return encode(text, **options)

    engine.tokenizer.encode = waiting  # type: ignore[method-assign]
    with serving(engine) as running, running.client("*/*") as client, ThreadPoolExecutor(1) as aside:
        aside.submit(client.post, PATHS["messages" in body], json=body)
        try:
            assert has_begun.wait(PATIENCE)
            assert client.post("/v1/completions", json=completion(), timeout=20).status_code == 200
        finally:
            may_end.set()


@pytest.mark.parametrize("path", PATHS)
def test_streamed_choices_are_interleaved_and_each_ends_once(path: str, folder: Path) -> None:
    """Each step waits until the tokens of the one before have been read."""
    engine, may_step = EchoEngine(folder), threading.Semaphore(1)
    engine.before_step = may_step.acquire
    body = {**(completion if "chat" not in path else chat)("ab"), "n": 3, "stream": True, "max_tokens": 40}
    order, ended = [], []
    with (
        serving(engine) as running,
        running.client() as client,
        client.stream("POST", path, json=body) as response,
    ):
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        for line in itertools.takewhile(lambda line: line != "[DONE]", lines):
            (choice,) = json.loads(line)["choices"]
            if choice.get("text") or choice.get("delta", {}).get("content"):
                order.append(choice["index"])
                if len(order) % 3 == 0:
                    may_step.release()
            if choice["finish_reason"] == "length":
                ended.append(choice["index"])
    assert order == [0, 1, 2] * 40
    assert ended == [0, 1, 2]


def test_best_of_equals_n(client: httpx.Client) -> None:
    for n, best_of in ((2, 2), (1, 1), (None, 1), (3, None)):
        assert len(whole(client, n=n, best_of=best_of)["choices"]) == (n or 1)
    for n, best_of in ((2, 1), (None, 2), (2, 3), (1, 0)):
        assert_refused(client.post("/v1/completions", json=completion(n=n, best_of=best_of)), "best_of")


def test_seeds_are_derived_and_the_first_is_kept() -> None:
    """Also of adjacent seeds all are different."""
    seeds = [derived_seed(seed, index) for seed in (5, 6) for index in range(3)]
    assert (seeds[0], seeds[3], derived_seed(None, 1)) == (5, 6, None)
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**64 for seed in seeds if seed is not None)


def test_choices_are_admitted_together_or_refused_together(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=1, max_waiting_requests=4)
    with serving(engine) as running, running.client() as client:
        refused = client.post("/v1/completions", json=completion(["a", "b"], n=3))
        assert_refused(refused, "prompt", "6 requests come together and max_waiting_requests is 4")  # it never could be
        with ThreadPoolExecutor(3) as aside:
            with engine.held():
                answers = [aside.submit(client.post, "/v1/completions", json=completion("a", n=3)) for _ in range(3)]
                wait_until(lambda: sum(answer.done() for answer in answers) == 2 and len(engine.waiting) == 3)
            assert sorted(answer.result().status_code for answer in answers) == [200, 503, 503]
        add, names = engine.add_request, list[str]()

        def refuse_the_third(prompt: Any, params: Any, name: str | None = None) -> str:
            assert name is not None
            names.append(name)
            if len(names) == 3:
                raise QueueFullError("There is no place any more.")
            return add(prompt, params, name)

        engine.add_request = refuse_the_third  # type: ignore[method-assign]
        num_steps = engine.num_steps
        assert client.post("/v1/completions", json=completion("a", n=4)).status_code == 503
        assert len(names) == 3
        assert engine.num_steps == num_steps, "none of them ran"
        assert client.get("/debug/engine").json()["num_open_requests"] == 0
        assert client.get("/health").json()["num_requests_waiting"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_one_choice_that_fails_ends_all_with_its_error(stream: bool, folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        body = completion(["ab", "abc" + POISON], n=2, max_tokens=4000, stream=stream)
        response = client.post("/v1/completions", json=body)
        if stream:
            *_, (_, error), (_, done) = events(response.text)
            assert (error["error"]["message"], done) == ("The request was poisoned.", "[DONE]")
        else:
            assert (response.status_code, error_of(response)["code"]) == (500, "engine_error")
        wait_until(lambda: not engine.has_work())
        assert client.get("/debug/engine").json()["audit"] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_all_its_choices(path: str, stream: bool, folder: Path) -> None:
    engine = endless(folder, max_batch_size=2)
    with serving(engine) as running, running.client() as client:
        body = (completion if "chat" not in path else chat)("ab", n=4, stream=stream, **ENDLESS)
        with unread(running, path, body):
            wait_until(lambda: len(engine.running) == 2)
        wait_until(lambda: not engine.has_work())
        assert client.get("/debug/engine").json()["num_open_requests"] == 0
        assert engine.pool.audit() == []


# `echo`


def test_a_character_that_ids_leave_incomplete_is_part_of_their_continuation(
    echo: Running, client: httpx.Client
) -> None:
    first, second = echo.engine.tokenizer.encode("é", add_special_tokens=False)
    for fields, expected in (
        ({"max_tokens": 1}, "é"),
        ({"max_tokens": 1, "echo": True}, "\ufffdé"),
        ({"max_tokens": 2, "echo": True}, "\ufffdé\ufffd"),
        ({"max_tokens": 0, "echo": True}, "\ufffd\ufffd"),
    ):
        assert whole(client, prompt=[second, first], **fields)["choices"][0]["text"] == expected, fields
