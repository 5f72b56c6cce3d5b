"""``infer serve`` as a process: OpenAI's own client against it, clients that leave, queues that fill, and its end."""

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from filelock import FileLock
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from typer.testing import CliRunner

from shared.cli import app
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson, lessons
from shared.sampling.params import SamplingParams
from tests.clients import openai_client
from tests.integration.infer_process import InferProcess
from tests.integration.server_process import EVENTS, MODEL, ServerProcess
from tests.waiting import PATIENCE, wait_until

SERVING = [lesson.number for lesson in lessons() if hasattr(lesson.engine, "add_request")]
FIRST, NEWEST = SERVING[0], SERVING[-1]
EXAMPLES = 15
OLD_CLIENT = "openai==1.97.1"
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance, negative_data_rejection]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The newest phase, with a long queue."""
    options = ("--max-waiting-requests", "256", "--engine-process")
    running = ServerProcess(folder, tmp_path_factory.mktemp("newest") / "log", *options)
    yield running
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def short_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The first phase that serves, with short sequences."""
    log = tmp_path_factory.mktemp("first") / "log"
    running = ServerProcess(folder, log, "--phase", FIRST, "--max-seq-len", "160")
    yield running
    assert running.end(signal.SIGINT) == 130  # interrupted, as every command says; it ends in the same order
    assert running.events("shutting down")
    assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def plain_engine(folder: Path) -> Any:
    """The loop for one request at a time, which says what must come out."""
    return find_lesson("03").engine(EngineConfig(model=str(folder)))


def long_body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "once", "max_tokens": 1900, "ignore_eos": True, **more}


# What OpenAI's client sees.

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "abc", "temperature": 0},
    {"prompt": "The capital of France is", "temperature": 0, "repetition_penalty": 1.3},
    {"prompt": [5, 6, 7, 8], "temperature": 1, "seed": 11},
    {"prompt": "x", "temperature": 0.7, "top_p": 0.9, "seed": 12},
    {"prompt": "日本語", "temperature": 1.5, "top_k": 40, "seed": 13},
    {"prompt": "stop here", "temperature": 1, "seed": 14, "stop": ["a", "e"]},
    {"prompt": "abc abc abc", "temperature": 2, "seed": 15},
    {"prompt": "one two three four", "temperature": 0.3, "seed": 16},
]


def expected_answer(engine: Any, request: dict[str, Any]) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason of a request that has the engine for itself."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
    given = {name: request[name] for name in names if name in request}
    params = SamplingParams(**given, stop=tuple(request.get("stop", ())), max_new_tokens=12)
    outputs = list(engine.generate(request["prompt"], params))
    reason = "length" if outputs[-1].finish_reason == "length" else "stop"
    return [output.token_id for output in outputs], "".join(output.text for output in outputs), reason


def counts(usage: Any) -> tuple[int, int, int]:
    """Tokens of prompt and answer, and of both; the second time the same is asked for, the prompt is cached."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.mark.parametrize("which", ["server", "short_server"])
def test_openais_client_streams_what_the_plain_loop_answers(
    which: str, plain_engine: Any, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(which).openai()

    def answer(wanted: dict[str, Any]) -> tuple[list[int], str, str]:
        body = dict(wanted)
        extra = {name: body.pop(name) for name in ("top_k", "repetition_penalty") if name in body}
        create = functools.partial(client.completions.create, model=MODEL, max_tokens=12, extra_body=extra, **body)
        *chunks, done, last = list(create(stream=True, stream_options={"include_usage": True}))
        assert {chunk.object for chunk in (*chunks, done, last)} == {"text_completion"}
        assert last.usage is not None
        assert last.usage.completion_tokens == len(chunks)
        assert last.usage.total_tokens == last.usage.prompt_tokens + len(chunks)
        ids = [chunk.token_id for chunk in chunks]
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), done.choices[0].finish_reason
        whole = create()
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, reason)
        assert counts(whole.usage) == counts(last.usage)
        return ids, text, reason

    with ThreadPoolExecutor(len(REQUESTS)) as together:
        answers = list(together.map(answer, REQUESTS))
    assert answers == [expected_answer(plain_engine, wanted) for wanted in REQUESTS]


def test_openais_client_understands_refusals(server: ServerProcess) -> None:
    client = server.openai()
    with pytest.raises(openai.UnprocessableEntityError) as unknown:
        client.completions.create(model="other", prompt="a", stream=True)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.UnprocessableEntityError, match="temperature is -1"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], temperature=-1)
    with pytest.raises(openai.BadRequestError, match="model is missing"):
        client.post("/completions", body={"prompt": "a"}, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    (model,) = client.models.list()
    assert model.id == MODEL
    limit = model.max_model_len
    for prompt in ([1] * limit, [1_000_000]):
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=1900)
        assert refused.value.param == "prompt"
    longest = client.completions.create(model=MODEL, prompt=[1] * (limit - 3), max_tokens=3)
    assert longest.usage.completion_tokens == 3


# Prefixes that are computed once.


@pytest.mark.skipif(NEWEST < "08", reason="no phase caches prefixes yet")
def test_cached_tokens_are_those_of_the_same_salt_in_every_form_of_an_answer(server: ServerProcess) -> None:
    """Prompts of 40 ids, of which two blocks of 16 are found the second time; a salt is another tenant."""
    client = server.openai()

    def ask(first: int, **fields: Any) -> tuple[int, int]:
        body = {"model": MODEL, "prompt": [first, *range(50, 89)], "max_tokens": 2, "temperature": 0, **fields}
        usage = client.completions.create(**body).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    def salted(salt: str) -> dict[str, Any]:
        return {"extra_body": {"cache_salt": salt}}

    before = counts_of(server)
    assert [ask(1), ask(1)] == [(40, 0), (40, 32)]
    assert [ask(1, **salted("a")), ask(1, **salted("a")), ask(1, **salted("b")), ask(1)] == [(40, 0), (40, 32)] * 2
    assert ask(2, n=3) == (40, 0), "the second and the third share the first's, and a prompt counts once"
    prompts = [[first, *range(50, 89)] for first in (2, 3, 1)]
    assert ask(0, prompt=prompts, n=2) == (120, 64)
    num_hits = 3 + 2 + (2 + 1 + 2)  # one by one; of three together; of three prompts, the second of which is new
    assert [now - then for now, then in zip(counts_of(server), before, strict=True)] == [15 * 40, num_hits * 32]
    usages = [
        chunk.usage
        for chunk in client.completions.create(
            model=MODEL,
            prompt=prompts[0],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            extra_body={"ignore_eos": True},
        )
    ]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [32] * 6
    turns: list[Any] = [{"role": "user", "content": "Tell me, how many tokens of this one have been computed?"}]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=40, temperature=0)
        turns += [{"role": "assistant", "content": answer.choices[0].message.content}, turns[0]]
        cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached > 0, "the second turn finds the first"
    for salt in ("", 3, "x" * 257):
        with pytest.raises(openai.UnprocessableEntityError, match=r"cache_salt is .*; it must be"):
            ask(1, **salted(salt))


def test_a_phase_without_a_prefix_cache_takes_a_salt_and_finds_nothing(short_server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 1, "cache_salt": "a", "stream": False}
    with short_server.client() as client:
        usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"] for usage in usages] == [{"cached_tokens": 0}] * 2
    assert counts_of(short_server) == [0, 0]


def counts_of(server: ServerProcess) -> list[float]:
    """Tokens that were looked up in the prefix cache, and found."""
    with server.client() as client:
        text = client.get("/metrics").text
    names = ("queries", "hits")
    found = [re.search(rf"^infer:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE) for name in names]
    return [float(match[1]) for match in found if match]


# Clients that leave.


STEADY = {"prompt": "steady", "temperature": 1, "seed": 5}
TALK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900}
LEAVING = [
    ("/v1/completions", long_body()),
    ("/v1/completions", long_body(stream=False)),
    ("/v1/chat/completions", {**TALK, "ignore_eos": True}),
    ("/v1/chat/completions", {**TALK, "ignore_eos": True, "stream": True}),
]


def test_of_two_hundred_requests_those_that_are_cancelled_leave_nothing_and_change_no_other(
    server: ServerProcess, plain_engine: Any
) -> None:
    """Some run when their clients leave, and most of them wait."""
    before = ends_of(server)

    async def cancel_most() -> tuple[int, list[bytes]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE, limits=limits, trust_env=False, headers=EVENTS
        ) as client:

            async def ask(path: str, body: dict[str, Any]) -> bytes:
                async with client.stream("POST", path, json=body) as response:
                    assert response.status_code == 200
                    return b"".join([part async for part in response.aiter_raw()])

            staying = [asyncio.create_task(ask("/v1/completions", long_body(max_tokens=500))) for _ in range(5)]
            leaving = [asyncio.create_task(ask(*LEAVING[n % len(LEAVING)])) for n in range(190)]
            steady = {"model": MODEL, "max_tokens": 12, "ignore_eos": True, **STEADY}
            staying += [asyncio.create_task(ask("/v1/completions", steady)) for _ in range(5)]
            async with asyncio.timeout(PATIENCE):
                while (await client.get("/health")).json()["num_requests_waiting"] < 150:
                    await asyncio.sleep(0.05)
            num_cancelled = sum(task.cancel() for task in leaving)
            await asyncio.gather(*leaving, return_exceptions=True)
            return num_cancelled, await asyncio.gather(*staying)

    num_cancelled, answers = asyncio.run(cancel_most())
    server.wait_until_idle()
    for answer, num_tokens in zip(answers, [500] * 5 + [12] * 5, strict=True):
        assert (answer.count(b"event: token"), answer.count(b"event: done")) == (num_tokens, 1)
    expected = expected_answer(plain_engine, STEADY)[0]
    for answer in answers[5:]:
        frames = [json.loads(line[6:]) for line in answer.decode().split("\n") if line.startswith("data: ")]
        assert [frame["token_id"] for frame in frames[: len(expected)]] == expected
    ended = {reason: count - before[reason] for reason, count in ends_of(server).items()}
    assert ended["length"] == 200 - num_cancelled
    assert 140 <= ended["abort"] <= num_cancelled


def ends_of(server: ServerProcess) -> dict[str, float]:
    """How many requests have ended, by reason."""
    with server.client() as client:
        text = client.get("/metrics").text
    found = re.findall(r'^infer:request_success_total{finished_reason="(\w+)".*} (\S+)$', text, re.MULTILINE)
    return {reason: float(count) for reason, count in found}


# A full queue, a reader that does not read, and the end.


@contextlib.contextmanager
def unread(url: str, body: dict[str, Any], *, receive_buffer: int = 2**16) -> Iterator[None]:
    """A completion is asked for, and nothing of it is read, not even its headers."""
    content = json.dumps(body).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        yield


def test_overflow_a_silent_reader_and_an_orderly_end(folder: Path, tmp_path: Path) -> None:
    limits = "--max-batch-size 1 --max-waiting-requests 1 --send-timeout 1 --named-events"
    server = ServerProcess(folder, tmp_path / "log", *limits.split())
    try:
        with server.client() as client:

            def load() -> tuple[int, int]:
                health = client.get("/health").json()
                return health["num_requests_running"], health["num_requests_waiting"]

            with contextlib.ExitStack() as open_streams:
                for expected in ((1, 0), (1, 1)):
                    open_streams.enter_context(unread(server.url, long_body()))
                    wait_until(lambda e=expected: load() == e)
                with pytest.raises(openai.InternalServerError) as raised:
                    server.openai().completions.create(model=MODEL, prompt="a", stream=True)
                assert (raised.value.status_code, raised.value.code) == (503, "queue_full")
                assert int(raised.value.response.headers["retry-after"]) >= 1
            server.wait_until_idle()

            with unread(server.url, long_body(logprobs=20), receive_buffer=4096):
                wait_until(lambda: "slow_reader" in server.log.read_text())
                server.wait_until_idle()

            with client.stream("POST", "/v1/completions", json=long_body(max_tokens=1, stream=False)) as first:
                assert first.read().count(b"event: done") == 1
            with client.stream("POST", "/v1/completions", json=long_body(max_tokens=900)) as running:
                lines = running.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                names = [line for line in lines if line.startswith("event: ")]
        assert set(names[:-1]) <= {"event: token"}
        assert names[-1] in ("event: error", "event: done")
        assert server.process.wait(PATIENCE) == 0
        assert server.events("shutting down")[0]["open_requests"] == 1
    finally:
        server.end()


def test_a_server_that_cannot_start_says_why_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            f"Port {port}": (str(folder), "--port", port),
            "no such model": (str(tmp_path / "nothing"), "--port", "0"),
            "Phase 03": (str(folder), "--phase", "03"),
            "max_batch_size is 0": (str(folder), "--port", "0", "--max-batch-size", "0"),
            "scheduler_policy": (str(folder), "--port", "0", "--phase", FIRST, "--scheduler-policy", "prefill_first"),
            "--log-format": (str(folder), "--log-format", "xml"),
            "API key": (str(folder), "--api-key", "two words"),
            "grace is": (str(folder), "--grace", "-1"),
        }
        for said, arguments in cases.items():
            result = CliRunner().invoke(app, ["serve", *arguments], prog_name="infer")
            assert result.exit_code == 2, (arguments, result.output, result.exception)
            assert result.stdout == ""
            complaint = result.stderr.strip()
            assert complaint.startswith("error: "), complaint
            assert "\n" not in complaint
            if said != "no such model":
                assert said in complaint
        started = InferProcess("serve", str(folder), "--port", port)
        assert started.wait(PATIENCE) == 2
        assert started.stderr.read().count(b"\n") == 1


@pytest.mark.parametrize("client", ["pinned", pytest.param(OLD_CLIENT, marks=pytest.mark.slow)])
def test_clients_of_openai_read_every_form_of_an_answer(client: str, server: ServerProcess) -> None:
    """The pinned one, and an old one that fails at a line `event:`, in an environment of its own."""
    if client == "pinned":
        openai_client.main(server.url, MODEL)
        return
    command = [python_with(client), openai_client.__file__, server.url, MODEL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr


def python_with(client: str) -> str:
    """The Python of an environment with a client of OpenAI, which is made once and kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infer" / "clients" / client
    made = folder / "bin/python"
    with FileLock(f"{folder}.lock"):
        if not (folder / ".ready").is_file():
            venv.create(folder, clear=True, with_pip=True)
            command = [str(made), "-m", "pip", "install", "-q", client]
            installed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if installed.returncode != 0:
                pytest.skip(f"pip cannot install {client} here: {installed.stderr.strip().splitlines()[-1]}")
            (folder / ".ready").touch()
    return str(made)


# Generated requests, valid and invalid.


STATUS_PATHS = ["/v1/models", "/v1/models/{name}", "/health", "/debug/engine", "/debug/memory"]
PATHS = ["/v1/completions", "/v1/chat/completions", *STATUS_PATHS]
TOLD = "This model's maximum context length is |prediction.content has |structured_output is |An answer has one "
TOLD += "|ignore_eos |tools|tool_choice |tool_call_id |arguments is |An assistant's turn has "
"""No schema counts tokens, or says which grammars can be compiled."""


def statuses_of(operation: Any, mode: GenerationMode) -> set[int]:
    """Send requests that the description allows, or such that it forbids; every answer must keep to it."""
    statuses = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(6)
    def send(case: Any) -> None:
        response = case.call_and_validate(checks=CHECKS, timeout=PATIENCE)
        statuses.add(response.status_code)
        if mode is GenerationMode.POSITIVE and response.status_code == 422:
            error = response.json()["error"]
            is_told = re.match(TOLD, error["message"]) or "phase 12 is the first" in error["message"]
            assert error["code"] == "invalid_grammar" or is_told, error

    with contextlib.suppress(Unsatisfiable):  # a path without parameters has no invalid request
        send()
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_nothing_that_the_description_allows_or_forbids_breaks_the_server(
    path: str, short_server: ServerProcess
) -> None:
    api = schemathesis.openapi.from_url(f"{short_server.url}/openapi.json")
    for operation in api[path].values():
        allowed, forbidden = (statuses_of(operation, mode) for mode in MODES)
        if "completions" in path:
            assert 200 in allowed
            assert 422 in forbidden
            assert 200 not in forbidden
