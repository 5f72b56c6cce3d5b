"""The server around an engine that echoes: what can be said of HTTP, threads and failures without a model.

The engine is a stand-in for the protocol of phases from 4 on, with the real tokenizer and the real stop conditions; it
can be made slow, made to fail at one request, and made to die. Every test speaks HTTP over a socket.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from shared.engine.config import EngineConfig
from shared.engine.output import OutputStream, StepOutput, TokenLogprobs
from shared.engine.prompt import check_prompt
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request
from shared.errors import QueueFullError, RequestError
from shared.sampling.params import SamplingParams
from shared.server.app import make_app
from shared.server.process import Server, address_of, bind
from shared.server.settings import ServerConfig
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

VOCAB, LIMIT = 512, 4096
POISON = "\x01"


@dataclass
class EchoPool:
    """A slot of LIMIT tokens for each request."""

    held: list[str] = field(default_factory=list)
    request_capacity = LIMIT
    capacity_tokens = 4 * LIMIT

    def holdings(self) -> tuple[int, dict[str, list[int]]]:
        return LIMIT, {request_id: [slot] for slot, request_id in enumerate(self.held)}

    def length(self, request_id: str) -> int:
        return 1

    def audit(self) -> list[str]:
        return [f"{request_id} holds memory" for request_id in self.held]


class EchoEngine:
    """Answers each prompt with its own tokens, over and over; a prompt that begins with POISON fails."""

    def __init__(self, folder: Path, *, max_batch_size: int = 4, max_waiting_requests: int = 64) -> None:
        self.config = EngineConfig(max_batch_size=max_batch_size, max_waiting_requests=max_waiting_requests)
        self.tokenizer = Tokenizer.load(folder)
        self.model = SimpleNamespace(config=SimpleNamespace(family="llama", vocab_size=VOCAB))
        self.max_seq_len = LIMIT
        self.pool = EchoPool()
        self.last_step: StepRecord | None = None
        self.step_seconds = 0.0
        self.num_steps = 0
        self.bug: Exception | None = None
        self.waiting: dict[str, OutputStream] = {}
        self.running: dict[str, OutputStream] = {}
        self.preempted: tuple[str, ...] = ()  # said of the next step

    @property
    def scheduler(self) -> Any:
        running = {request_id: stream.request for request_id, stream in self.running.items()}
        waiting = {request_id: stream.request for request_id, stream in self.waiting.items()}
        return SimpleNamespace(pool=self.pool, running=running, waiting=waiting, num_preemptions=0)

    def add_request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        assert request_id is not None
        ids = check_prompt(prompt, VOCAB, LIMIT)
        if len(self.waiting) >= self.config.max_waiting_requests:
            raise QueueFullError(f"{len(self.waiting)} requests wait, as many as may.")
        if request_id in self.waiting or request_id in self.running:
            raise RequestError(f"The id {request_id} is in use.")
        self.waiting[request_id] = OutputStream(Request(request_id, ids, params, 0), self.tokenizer, LIMIT)
        return request_id

    def step(self) -> list[StepOutput]:
        if self.bug is not None:
            raise self.bug
        time.sleep(self.step_seconds)
        admitted = list(self.waiting)[: self.config.max_batch_size - len(self.running)]
        self.running |= {request_id: self.waiting.pop(request_id) for request_id in admitted}
        self.pool.held += admitted
        outputs = [self._next(stream) for stream in self.running.values()]
        ended = [output.request_id for output in outputs if output.finish_reason is not None]
        for request_id in ended:
            self.abort(request_id)
        prefilled = tuple((request_id, 1) for request_id in admitted)
        load = self.load()
        self.last_step = StepRecord(
            self.num_steps, prefilled, (), tuple(ended), (), load.num_waiting, load.num_running, 0, 1, self.preempted
        )
        self.preempted = ()
        self.num_steps += 1
        return outputs

    def abort(self, request_id: str) -> bool:
        if self.waiting.pop(request_id, None) is not None:
            return True
        if self.running.pop(request_id, None) is None:
            return False
        self.pool.held.remove(request_id)
        return True

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> dict[str, int]:
        return {"steps": self.num_steps}

    def load(self) -> EngineLoad:
        return EngineLoad(len(self.running), len(self.waiting), len(self.running) / self.config.max_batch_size, 0)

    def _next(self, stream: OutputStream) -> StepOutput:
        request = stream.request
        special = self.tokenizer.special_ids
        text_ids = [index for index in request.prompt_ids if index not in special] or request.prompt_ids
        if text_ids[0] == self.tokenizer.encode(POISON, add_special_tokens=False)[0]:
            return StepOutput(request.request_id, None, "", FinishReason.ERROR, error="The request was poisoned.")
        token_id = text_ids[len(request.output_ids) % len(text_ids)]
        count = request.params.logprobs
        top = tuple((text_ids[0] + i, -1.0 - i) for i in range(count)) if count else ()
        return stream.push(token_id, None if count is None else TokenLogprobs(-0.5, top))


@dataclass
class Running:
    """A server that runs on a thread of this process."""

    url: str
    engine: EchoEngine
    app: Any
    server: Server
    loop: asyncio.AbstractEventLoop

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)

    def call(self, function: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(function)


@contextlib.contextmanager
def serving(engine: EchoEngine, **settings: Any) -> Iterator[Running]:
    config = ServerConfig(model_name="echo", **settings)
    app = make_app(engine, config)
    bound = bind("127.0.0.1", 0)
    bound.listen()
    url = address_of(bound)
    server = Server(app, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    assert server._event_loop is not None
    try:
        yield Running(url, engine, app, server, server._event_loop)
    finally:
        engine.step_seconds = 0.0
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_until(is_so: Callable[[], bool], seconds: float = 10) -> float:
    """Wait for it, fail if it does not come; how long it took."""
    started = time.perf_counter()
    while not is_so():
        assert time.perf_counter() - started < seconds, "it did not come in time"
        time.sleep(0.005)
    return time.perf_counter() - started


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["llama"]


@pytest.fixture(scope="module")
def echo(folder: Path) -> Iterator[Running]:
    with serving(EchoEngine(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def client(echo: Running) -> Iterator[httpx.Client]:
    with echo.client() as client:
        yield client


def completion(prompt: Any = "ab", **more: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": prompt, "max_tokens": 4, **more}


def chat(text: str = "ab", **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def events(text: str) -> list[tuple[str | None, Any]]:
    """(name, data) of each frame; data stays text where it is no JSON. Every line of the stream is accounted for."""
    found: list[tuple[str | None, Any]] = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        assert set(fields) <= {"event", "data"}, block
        if fields:
            data = fields["data"]
            found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after a look at its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].strip().endswith(".")
    return body["error"]


# Completions.


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


def test_plain_events_have_no_names_and_end_in_openais_manner(folder: Path) -> None:
    with serving(EchoEngine(folder), plain_events=True) as running, running.client() as client:
        body = completion(stream_options={"include_usage": True})
        frames = events(client.post("/v1/completions", json=body).text)
        assert [name for name, _ in frames] == [None] * 7
        assert [data["token_id"] is not None for _, data in frames[:5]] == [True] * 4 + [False]
        assert frames[4][1]["choices"][0]["finish_reason"] == "length"
        assert frames[4][1]["usage"] == frames[5][1]["usage"]
        assert frames[5][1]["choices"] == []
        assert frames[6][1] == "[DONE]"
        frames = events(client.post("/v1/completions", json=completion(POISON)).text)
        assert [data if data == "[DONE]" else set(data) for _, data in frames] == [{"error"}, "[DONE]"]


# Chat.


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


def test_chat_as_one_body_says_what_the_stream_says(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json=chat(max_tokens=20)).json()
    frames = events(client.post("/v1/chat/completions", json=chat(max_tokens=20, stream=True)).text)
    pieces = [data["choices"][0]["delta"].get("content", "") for _, data in frames[:-1]]
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "".join(pieces), "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 20


def test_logprobs_of_chat(client: httpx.Client) -> None:
    body = chat(logprobs=True, top_logprobs=1)
    shown = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(shown) == 4
    assert set(shown[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert [set(top) for top in shown[0]["top_logprobs"]] == [{"token", "logprob", "bytes"}]
    assert bytes(shown[0]["bytes"]).decode() == shown[0]["token"]
    bare = client.post("/v1/chat/completions", json=chat(logprobs=True)).json()["choices"][0]["logprobs"]
    assert bare["content"][0]["top_logprobs"] == []


def test_an_answer_can_be_sent_back_as_it_came(client: httpx.Client) -> None:
    message = client.post("/v1/chat/completions", json=chat()).json()["choices"][0]["message"]
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
        assert response.status_code == 422
        assert error_of(response)["param"] == "model"
        assert str(Path.home()) not in response.text


# Values and refusals.

NEUTRAL = {
    "n": [1, None],
    "presence_penalty": [0, 0.0, None],
    "frequency_penalty": [0, 0.0, None],
    "logit_bias": [{}, None],
    "stop": [None, [], "never"],
    "seed": [None, 0, 2**64 - 1],
    "top_k": [None, 0, -1, 5],
    "user": ["someone", None],
    "metadata": [{"a": "b"}, None],
    "temperature": [None, 0, 0.0, 2],
    "repetition_penalty": [None, 1, 1.0],
    "stream_options": [None, {"include_usage": False}],
    "skip_special_tokens": [True],
    "min_p": [0, 0.0],
    "ignore_eos": [True, False, None],
}
REFUSED = {
    "n": [2, 0, "1", True],
    "presence_penalty": [0.5],
    "frequency_penalty": [-1],
    "logit_bias": [{"5": 1}],
    "temperature": [-0.1, "0.7", [], True],
    "top_p": [0, 1.1, -1],
    "top_k": [-2, 1.5],
    "repetition_penalty": [0, -1],
    "max_tokens": [0, -3, 1.5, 10**9, "4"],
    "stop": [["a"] * 17, [""], 3, "x" * 257, [1]],
    "seed": [-1, 2**64, 0.5],
    "stream": ["yes"],
    "stream_options": [{"include_usage": "yes"}, {"whatever": 1}],
    "model": ["other", "", 3],
    "min_p": [0.1],
    "unheard_of": [None, 1],
}


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_values_that_change_nothing_are_accepted(name: str, client: httpx.Client) -> None:
    for value in NEUTRAL[name]:
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            response = client.post(path, json={**body, "max_tokens": 1, name: value})
            assert response.status_code == 200, (path, value, response.text)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_value_that_is_not_possible_is_refused_by_its_name(name: str, client: httpx.Client) -> None:
    for value in REFUSED[name]:
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            response = client.post(path, json={**body, name: value})
            assert response.status_code == 422, (path, value, response.text)
            error = error_of(response)
            assert error["param"].split(".")[0] == name
            assert error["type"] == "invalid_request_error"
            assert name.split("_")[0] in error["message"]


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], {}, 7, None, [VOCAB], [-1], "\ud800"],
)
def test_prompts_that_are_none_are_refused(prompt: Any, client: httpx.Client) -> None:
    body = json.dumps(completion(prompt)).encode()
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422, response.text
    assert error_of(response)["param"] == "prompt"


def test_a_prompt_that_is_too_long_is_refused(client: httpx.Client) -> None:
    for path, body in (("/v1/completions", completion("x" * LIMIT)), ("/v1/chat/completions", chat("x" * LIMIT))):
        response = client.post(path, json=body)
        assert response.status_code == 422
        assert error_of(response)["param"] in ("prompt", "messages")
        assert str(LIMIT) in error_of(response)["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "x", "name": "Ada"}],
        [{"role": "user", "content": "x", "tool_calls": [{}]}],
    ],
)
def test_messages_that_are_none_are_refused(messages: Any, client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={"model": "echo", "messages": messages})
    assert response.status_code == (400 if messages == [{"role": "user"}] else 422)
    assert error_of(response)["param"].split(".")[0] == "messages"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"model": "echo"}', "missing_field"),
        (b'{"prompt": "a"}', "missing_field"),
        (b'{"model": "echo", "prompt": "\xff"}', "invalid_request"),
        (b"[" * 100_000, "invalid_request"),
        (b'{"model": "echo", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_request"),
    ],
)
def test_what_is_no_request_is_400(content: bytes, code: str, client: httpx.Client) -> None:
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert error_of(response)["code"] == code


def test_json_is_asked_for(client: httpx.Client) -> None:
    for headers in ({"content-type": "text/plain"}, {}):
        response = client.post("/v1/completions", content=json.dumps(completion()).encode(), headers=headers)
        assert response.status_code == 400
        assert "application/json" in error_of(response)["message"]


def test_not_a_number_is_refused(client: httpx.Client) -> None:
    for value in ("NaN", "Infinity"):
        content = f'{{"model": "echo", "prompt": "a", "temperature": {value}}}'.encode()
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 422
        assert error_of(response)["param"] == "temperature"


def test_the_frameworks_own_errors_have_the_same_shape(client: httpx.Client) -> None:
    assert error_of(client.get("/nowhere"))["code"] == "not_found"
    assert error_of(client.get("/page/nothing.js"))["code"] == "not_found"
    assert error_of(client.get("/v1/models/other"))["code"] == "model_not_found"
    refused = client.get("/v1/completions")
    assert refused.status_code == 405
    assert refused.headers["allow"] == "POST"
    assert error_of(refused)["code"] == "method_not_allowed"
    assert client.get("/docs").status_code == 404


def test_a_body_is_bounded_announced_or_not(folder: Path) -> None:
    with serving(EchoEngine(folder), max_body_bytes=5000) as running, running.client() as client:
        body = json.dumps(completion("x" * 6000)).encode()
        for content in (body, iter([body[:3000], body[3000:]])):
            response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert error_of(response)["code"] == "body_too_large"
            assert "5000" in error_of(response)["message"]
        assert client.post("/v1/completions", json=completion("x" * 4000)).status_code == 200


def test_a_body_that_does_not_come_is_given_up(folder: Path) -> None:
    with serving(EchoEngine(folder), body_timeout=0.3) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
            )
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"body_timeout"' in answer


# Keys, ids, status.


def test_an_api_key_guards_the_api_alone(folder: Path) -> None:
    with serving(EchoEngine(folder), api_key="secret") as running, running.client() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            guarded = (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/debug/engine"))
            for method, path in (*guarded, ("GET", "/debug/memory")):
                response = client.request(method, path, headers=headers, content=b"{")
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert error_of(response)["type"] == "authentication_error"
        granted = {"authorization": "Bearer secret"}
        assert client.post("/v1/completions", json=completion(), headers=granted).status_code == 200
        assert client.get("/debug/engine", headers=granted).status_code == 200
        assert [client.get(path).status_code for path in ("/health", "/metrics", "/")] == [200, 200, 200]


def test_every_response_carries_a_request_id(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    made = client.post("/v1/completions", json=completion(), headers={"x-request-id": "bad id"}).headers
    assert len(made["x-request-id"]) == 32
    assert len(client.get("/nowhere").headers["x-request-id"]) == 32


def test_models_and_health(client: httpx.Client) -> None:
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(model["id"], model["object"], model["max_model_len"]) for model in models["data"]] == [
        ("echo", "model", LIMIT)
    ]
    assert client.get("/v1/models/echo").json() == models["data"][0]
    for path in ("/health", "/health/live", "/health/ready"):
        health = client.get(path)
        assert health.status_code == 200
        assert (health.json()["live"], health.json()["ready"]) == (True, True)


def samples(client: httpx.Client) -> dict[str, float]:
    """The metrics by name with labels, as Prometheus would read them."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_metrics_count_what_happened(folder: Path) -> None:
    with serving(EchoEngine(folder)) as running, running.client() as client:
        prompts = 0
        for count in (3, 5):
            frames = events(client.post("/v1/completions", json=completion(max_tokens=count)).text)
            prompts += frames[-1][1]["usage"]["prompt_tokens"]
        client.post("/v1/completions", json=completion("abc", stop="b"))
        client.post("/v1/completions", json=completion(POISON))
        client.post("/v1/completions", json=completion(""))
        client.get("/no/such/path")
        found = samples(client)
    assert found["infer:generation_tokens_total{}"] == 3 + 5 + 2
    assert found["infer:prompt_tokens_total{}"] == prompts + prompts // 2 + 1
    assert found["infer:request_success_total{finished_reason=length}"] == 2
    assert found["infer:request_success_total{finished_reason=stop}"] == 1
    assert found["infer:request_success_total{finished_reason=error}"] == 1
    assert found["infer:request_success_total{finished_reason=abort}"] == 0
    assert found["infer:time_to_first_token_seconds_count{}"] == 3
    assert found["infer:request_queue_time_seconds_count{}"] == 3
    assert found["infer:inter_token_latency_seconds_count{}"] == 2 + 4 + 1
    assert found["infer:e2e_request_latency_seconds_count{}"] == 4
    assert found["infer:num_requests_running{}"] == 0
    assert found["infer:num_requests_waiting{}"] == 0
    assert found["infer:kv_cache_usage_perc{}"] == 0
    assert found["infer:http_requests_total{handler=completions,status=200}"] == 4
    assert found["infer:http_requests_total{handler=completions,status=422}"] == 1
    assert found["infer:http_requests_total{handler=other,status=404}"] == 1


def test_gauges_show_who_runs_and_who_waits(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=2)
    with serving(engine) as running, running.client() as client, contextlib.ExitStack() as open_streams:
        engine.step_seconds = 0.05
        for _ in range(5):
            open_streams.enter_context(client.stream("POST", "/v1/completions", json=completion(max_tokens=1000)))
        wait_until(lambda: len(engine.running) == 2)
        found = samples(client)
        assert found["infer:num_requests_running{}"] == 2
        assert found["infer:num_requests_waiting{}"] == 3
        assert found["infer:kv_cache_usage_perc{}"] == 1
        assert client.get("/health").json()["num_requests_waiting"] == 3


def test_preemptions_are_counted(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        assert samples(client)["infer:num_preemptions_total{}"] == 0
        for preempted in (("a", "b"), (), ("a",)):
            engine.preempted = preempted
            client.post("/v1/completions", json=completion())
        assert samples(client)["infer:num_preemptions_total{}"] == 3


def test_the_memory_between_two_steps(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=2)
    with serving(engine) as running, running.client() as client, contextlib.ExitStack() as open_streams:
        nothing = client.get("/debug/memory").json()
        assert (nothing["unit"], nothing["num_blocks"], nothing["num_free"]) == ("slot", 4, 4)
        assert (nothing["holdings"], nothing["written_share"]) == ([], None)
        engine.step_seconds = 0.05
        for _ in range(3):
            open_streams.enter_context(client.stream("POST", "/v1/completions", json=completion(max_tokens=1000)))
        wait_until(lambda: len(engine.running) == 2)
        found = client.get("/debug/memory").json()
        assert [holding["blocks"] for holding in found["holdings"]] == [[0], [1]]
        assert [holding["request_id"] for holding in found["holdings"]] == engine.pool.held
        assert (found["num_free"], found["num_waiting"], found["num_preemptions"]) == (2, 1, 0)


def test_a_step_that_takes_too_long_keeps_nobody_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.server.status.DESCRIBE_TIMEOUT", 0.1)
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client, running.client() as other:
        engine.step_seconds = 1.0
        with client.stream("POST", "/v1/completions", json=completion(max_tokens=2)) as response:
            refused = [other.get(f"/debug/{name}") for name in ("memory", "engine")]
            engine.step_seconds = 0.0
            response.read()
        assert [error_of(answer)["code"] for answer in refused] == ["engine_busy"] * 2
        monkeypatch.undo()
        assert client.get("/debug/memory").status_code == 200, "the thread lives on"


# One bad request, a slow engine, a dead one.


def test_a_request_that_fails_takes_nobody_with_it(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        engine.step_seconds = 0.02
        answers: dict[str, str] = {}
        threads = [
            threading.Thread(
                target=lambda p=prompt: answers.__setitem__(
                    p, client.post("/v1/completions", json=completion(p, max_tokens=20)).text
                )
            )
            for prompt in ("ab", POISON, "cd")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt in ("ab", "cd"):
            frames = events(answers[prompt])
            assert "".join(data["choices"][0]["text"] for _, data in frames) == prompt * 10
        ((name, data),) = events(answers[POISON])
        assert name == "error"
        assert data["error"]["message"] == "The request was poisoned."
        assert data["error"]["code"] == "engine_error"
        refused = client.post("/v1/chat/completions", json=chat(POISON))
        assert refused.status_code in (200, 500)
        assert client.get("/debug/engine").json()["audit"] == []


def test_a_slow_step_delays_no_health_check(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client, running.client() as other:
        engine.step_seconds = 1.0
        with client.stream("POST", "/v1/completions", json=completion(max_tokens=3)) as response:
            delays = []
            for _ in range(20):
                started = time.perf_counter()
                assert other.get("/health").status_code == 200
                assert other.get("/metrics").status_code == 200
                delays.append(time.perf_counter() - started)
                time.sleep(0.05)
            engine.step_seconds = 0.0
            response.read()
        assert max(delays) < 0.5
        assert sorted(delays)[10] < 0.1


def test_a_dead_engine_ends_every_stream_and_the_readiness(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        engine.step_seconds = 0.05
        with client.stream("POST", "/v1/completions", json=completion(max_tokens=3000)) as response:
            lines = response.iter_lines()
            next(lines)
            engine.bug = RuntimeError("boom")
            rest = "\n".join(lines)
        assert rest.count("event: error") == 1
        assert rest.count("event: done") == 0
        assert json.loads(rest.rpartition("data: ")[2])["error"]["code"] == "engine_error"
        health = client.get("/health")
        assert (health.status_code, health.json()["live"], health.json()["ready"]) == (503, False, False)
        assert client.get("/health/live").status_code == 503
        refused = client.post("/v1/completions", json=completion())
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "engine_stopped"
        assert error_of(client.get("/debug/engine"))["code"] == "engine_stopped"


def test_a_bug_in_taking_a_request_is_that_requests_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "add_request", lambda *_: 1 / 0)
            failed = client.post("/v1/completions", json=completion())
        assert failed.status_code == 500
        assert error_of(failed)["type"] == "server_error"
        assert client.post("/v1/completions", json=completion()).status_code == 200
        assert client.get("/debug/engine").json()["num_open_requests"] == 0


@pytest.mark.parametrize("is_plain", [False, True])
def test_openais_client_raises_what_ends_a_stream(is_plain: bool, folder: Path) -> None:
    with serving(EchoEngine(folder), plain_events=is_plain) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
        chunks = list(client.completions.create(model="echo", prompt="ab", max_tokens=4, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abab"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4
        with pytest.raises(openai.APIError, match="The request was poisoned"):
            list(client.completions.create(model="echo", prompt=POISON, stream=True))


# Queues, and clients that leave or do not read.


def test_a_full_queue_is_503_with_a_time_to_wait(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=1, max_waiting_requests=2)
    with serving(engine, retry_after=7) as running, running.client() as client, contextlib.ExitStack() as streams:
        engine.step_seconds = 0.02
        for expected in (1, 2, 3):
            streams.enter_context(client.stream("POST", "/v1/completions", json=completion(max_tokens=4000)))
            wait_until(lambda expected=expected: len(engine.running) + len(engine.waiting) == expected)
            wait_until(lambda: bool(engine.running))
        for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
            refused = client.post(path, json=body)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "7"
            assert error_of(refused)["code"] == "queue_full"
            assert error_of(refused)["type"] == "overloaded_error"


def test_requests_are_bounded_even_while_a_step_runs(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=1, max_waiting_requests=1)
    with serving(engine) as running, running.client() as client:
        engine.step_seconds = 1.0
        codes: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: codes.append(client.post("/v1/completions", json=completion(max_tokens=1)).status_code)
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: codes.count(503) >= 4, seconds=0.9)
        engine.step_seconds = 0.0
        for thread in threads:
            thread.join()
        assert sorted(codes)[:1] == [200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(max_tokens=4000)),
        ("/v1/chat/completions", chat(max_tokens=4000)),
        ("/v1/chat/completions", chat(max_tokens=4000, stream=True)),
    ],
    ids=["completion", "chat", "chat stream"],
)
def test_a_client_that_leaves_frees_its_slot_within_two_steps(path: str, body: dict[str, Any], folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.step_seconds = 0.05
    with serving(engine) as running:
        with connected(running, path, body):
            wait_until(lambda: bool(engine.running) and engine.num_steps > 2)
        wait_until(lambda: running.app.state.thread.num_open_requests == 0, seconds=5)
        seen = engine.num_steps
        wait_until(lambda: not engine.running)
        assert engine.num_steps - seen <= 2
        assert engine.pool.audit() == []
        with running.client() as client:
            assert samples(client)["infer:request_success_total{finished_reason=abort}"] == 1


@contextlib.contextmanager
def connected(running: Running, path: str, body: dict[str, Any], *, receive_buffer: int = 2**16) -> Iterator[Any]:
    """A connection on which this request was sent, and from which nothing has been read."""
    host, port = running.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (path.encode(), len(content), content)
        )
        yield connection


def test_a_client_that_waits_in_the_queue_may_leave_too(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=1)
    engine.step_seconds = 0.02
    with (
        serving(engine) as running,
        running.client() as first,
        first.stream("POST", "/v1/completions", json=completion(max_tokens=4000)),
    ):
        wait_until(lambda: len(engine.running) == 1)
        with running.client() as second, second.stream("POST", "/v1/completions", json=completion()):
            wait_until(lambda: len(engine.waiting) == 1)
        wait_until(lambda: not engine.waiting, seconds=5)
        assert len(engine.running) == 1


@pytest.mark.parametrize("logprobs", [None, 20])
def test_a_reader_that_does_not_read_is_bounded_and_cut_off(logprobs: int | None, folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.max_seq_len = 2**31
    with serving(engine, send_timeout=1.0) as running:
        body = completion(max_tokens=10**6, ignore_eos=True, logprobs=logprobs)
        with connected(running, "/v1/completions", body, receive_buffer=4096) as connection:
            wait_until(lambda: bool(engine.running))
            largest = 0

            def is_cut_off() -> bool:
                nonlocal largest
                for stream in list(running.app.state.thread._streams.values()):
                    largest = max(largest, stream._unread_bytes)
                for protocol in list(running.server.server_state.connections):
                    largest = max(largest, protocol.transport.get_write_buffer_size())
                return not running.server.server_state.connections

            wait_until(is_cut_off, seconds=8)
            assert 0 < largest <= 512 * 1024
            connection.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass
        assert not engine.running
        assert engine.pool.audit() == []


def test_silence_is_broken_by_comments(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine, keep_alive=0.1) as running, running.client() as client:
        engine.step_seconds = 0.5
        text = client.post("/v1/completions", json=completion(max_tokens=2)).text
        assert text.count(": still here\n\n") >= 3
        assert [name for name, _ in events(text)] == ["token", "token", "done"]


# The end.


def test_running_streams_end_inside_the_grace_time(folder: Path) -> None:
    engine = EchoEngine(folder)
    engine.step_seconds = 0.02
    with serving(engine, grace=2.0) as running, running.client() as client, running.client() as other:
        assert other.get("/health").status_code == 200
        with (
            client.stream("POST", "/v1/completions", json=completion(max_tokens=4000)) as long,
            client.stream("POST", "/v1/completions", json=completion(max_tokens=20)) as short,
            other.stream("POST", "/v1/chat/completions", json=chat(max_tokens=4000, stream=True)) as talk,
        ):
            started = time.perf_counter()
            running.call(lambda: running.server.handle_exit(15, None))
            ended = {name: "".join(stream.iter_text()) for name, stream in (("short", short), ("long", long))}
            spoken = "".join(talk.iter_text())
            seconds = time.perf_counter() - started
        assert [name for name, _ in events(ended["short"])] == ["token"] * 20 + ["done"]
        names = [name for name, _ in events(ended["long"])]
        assert set(names[:-1]) == {"token"}
        assert names[-1] == "error"
        assert events(ended["long"])[-1][1]["error"]["code"] == "shutting_down"
        assert [data for _, data in events(spoken)][-1] == "[DONE]"
        assert events(spoken)[-2][1]["error"]["code"] == "shutting_down"
        assert 0.5 < seconds <= 2.0
        with pytest.raises(httpx.TransportError):
            other.get("/health")


# The page's files, and the description of it all.


def test_the_page_comes_with_a_policy_and_asks_nobody_else(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    parts = [word.split('"')[0] for word in page.text.split('="/page/')[1:]]
    assert {part.rpartition(".")[2] for part in parts} >= {"css", "js", "svg"}
    assert {"pool.js", "pool.css"} <= set(parts), "what the page of a trace draws with too"
    for part in parts:
        assert client.get(f"/page/{part}").status_code == 200
    assert "http://" not in page.text.replace("http://www.w3.org/", "")
    assert "https://" not in page.text


def test_openapi_describes_bodies_and_errors(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"}
    assert "HoldingState" in described["components"]["schemas"]
    assert "HTTPValidationError" not in json.dumps(described)
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "422", "503"} <= set(responses)
    properties = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["n"]["enum"] == [1, None]
