"""Parts of the server that need no socket: settings, frames, the stream between the threads."""

import asyncio
import dataclasses
import itertools
import json
import logging
import resource
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import Histogram

from shared.cli.options import listed
from shared.cli.serve import _default_tokens, model_name
from shared.engine.output import StepOutput
from shared.engine.request import TokenLogprobs
from shared.errors import ConfigError, RankError
from shared.server import process
from shared.server.answers.answer import Answer
from shared.server.answers.answer_stream import AnswerStream
from shared.server.answers.logprobs import Scored, completion_logprobs
from shared.server.engine.served_engine import EngineFacts
from shared.server.errors import ApiError
from shared.server.http.event_stream import EventStreamResponse, WholeResponse
from shared.server.http.middleware import RequestRecord, _log_request
from shared.server.http.sse import frame, to_json
from shared.server.metrics import SHORT, ServerMetrics
from shared.server.process import address_of, bind, is_exposed
from shared.server.routes.completions import CompletionFrames
from shared.server.routes.segments import context
from shared.server.settings import ServerConfig
from shared.text.stopping import FinishReason
from shared.tracks.segments.inquiry import Blend, SegmentInfo, Use
from tests.unit.server.exchange import events


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "model_name": ["", "a\nb"],
        "api_key": ["", "two words", "schlüssel"],
        **{f"max_{name}": [0, -1] for name in ("tokens", "chat_tokens", "connections", "unread_bytes")},
        **{f"max_{name}_bytes": [0, -1] for name in ("body", "head", "url")},
        **{name: [0] for name in ("body_timeout", "head_timeout", "send_timeout", "keep_alive")},
        "grace": [0, -1, float("inf"), float("nan")],
        "root_path": ["llm", "/", "/llm/", "//llm", "/a b"],
        "retry_after": [0],
    }.items(),
)
def test_settings_that_make_no_sense_are_refused(name: str, values: list[Any]) -> None:
    config = ServerConfig(model_name="m")
    for value in values:
        with pytest.raises(ConfigError, match={"api_key": "API key", "model_name": "model's name"}.get(name, name)):
            dataclasses.replace(config, **{name: value})


def test_a_key_is_not_repeated_in_a_refusal() -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(model_name="m", api_key="my secret")
    assert "secret" not in str(refused.value)


@given(text=st.text())
@example(text="\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\r\n")
def test_no_text_ends_a_frame(text: str) -> None:
    encoded = frame(to_json({"text": text}), "token").decode()
    assert encoded.endswith("\n\n")
    name, data, *rest = encoded.splitlines()  # at more characters than a server-sent event has line ends
    assert (name, rest) == ("event: token", [""])
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def make_stream(max_unread_bytes: int = 10_000) -> tuple[AnswerStream, list[str]]:
    abandoned: list[str] = []
    limits: Any = {"max_unread_bytes": max_unread_bytes, "num_segment_tokens": 2, "abandon": abandoned.append}
    stream = AnswerStream("id", [1, 2, 3], index=0, param="prompt", **limits)
    return stream, abandoned


def output(text: str = "x", **more: Any) -> StepOutput:
    return StepOutput("id", 1, text, **more)


def test_a_stream_gives_everything_once_and_then_nothing() -> None:
    async def run() -> None:
        stream, abandoned = make_stream()
        answer = Answer("id", [stream])

        async def taken() -> list[str]:
            return [one.text for _, outputs in await answer.take() for one in outputs]

        stream.push(output("a", num_cached_tokens=2), 1.0)
        stream.push(output("b"), 2.0)
        stream.flush()
        assert await taken() == ["a", "b"]
        taking = asyncio.create_task(taken())
        await asyncio.sleep(0)
        assert not taking.done()
        assert answer.is_open
        drafts = {"num_accepted_drafts": 1, "num_rejected_drafts": 4}
        stream.push(output("c", finish_reason=FinishReason.STOP, stop="d", **drafts), 3.0)
        assert await taking == ["c"]
        assert not answer.is_open
        assert await answer.take() == []
        assert (stream.num_tokens, stream.first_token, stream.last_token, stream.ended) == (3, 1.0, 3.0, 3.0)
        assert (stream.finish_reason, stream.stop, stream.error) == (FinishReason.STOP, "d", None)
        counts = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        so_far = {**counts, "prompt_tokens_details": {"cached_tokens": 2}}
        assert answer.usage_after(3) == so_far
        details = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 4}
        assert answer.usage == {**so_far, "completion_tokens_details": details}
        stream.cancel("late")
        stream.push(output("z"), 4.0)
        assert (stream.num_tokens, stream.cause, abandoned) == (3, None, [])

    asyncio.run(run())


def test_a_nudge_wakes_and_ends_nothing() -> None:
    async def run() -> None:
        stream, _ = make_stream()
        answer = Answer("id", [stream])
        taking = asyncio.create_task(answer.take())
        await asyncio.sleep(0)
        answer.nudge()
        assert await taking == []
        assert answer.is_open
        taking = asyncio.create_task(answer.take())
        await asyncio.sleep(0)
        assert not taking.done(), "it wakes once"
        stream.push(output("a"), 1.0)
        stream.flush()
        assert len(await taking) == 1

    asyncio.run(run())


def test_outputs_are_written_at_once_only_while_the_task_waits_for_them() -> None:
    async def run() -> None:
        stream, _ = make_stream()
        answer = Answer("id", [stream])
        written: list[str] = []
        can_write = True

        def write(choice: AnswerStream) -> bool:
            if can_write:
                written.extend(one.text for one in choice.take())
            return can_write

        async def taken() -> list[str]:
            return [one.text for _, outputs in await answer.take() for one in outputs]

        def push(text: str, **more: Any) -> None:
            stream.push(output(text, **more), 1.0)
            stream.flush()

        answer.write = write
        push("a")
        assert await taken() == ["a"]  # the task was not waiting
        taking = asyncio.create_task(taken())
        await asyncio.sleep(0)
        push("b")
        push("c")
        assert written == ["b", "c"]
        can_write = False
        push("d")
        can_write = True
        push("e")  # after what the task has not taken yet
        assert await taking == ["d", "e"]
        taking = asyncio.create_task(taken())
        await asyncio.sleep(0)
        push("f", finish_reason=FinishReason.LENGTH)
        assert await taking == ["f"]
        assert written == ["b", "c"]

    asyncio.run(run())


@pytest.mark.parametrize("logprobs", [None, TokenLogprobs(-0.1, tuple((i, -0.123456789012345) for i in range(20)))])
@pytest.mark.parametrize("text", ["", "x", "\u2028" * 50, '"' * 50])
def test_what_waits_unread_is_bounded_by_what_it_becomes(text: str, logprobs: TokenLogprobs | None) -> None:
    async def run() -> None:
        limit = 100_000
        stream, abandoned = make_stream(limit)
        pushed: list[StepOutput] = []
        stream.push(output("x" * (limit // 7)), 1.0)
        assert len(stream.take()) == 1, "what was read does not count"
        while stream.is_open:
            pushed.append(output(text, logprobs=logprobs))
            stream.push(pushed[-1], 1.0)
        assert abandoned == ["id"]
        assert stream.error is not None
        assert stream.error.code == "slow_reader"

        class Names:
            def token_bytes(self, token_id: int) -> bytes:
                return b"%d" % token_id

        frames = CompletionFrames(Answer("cmpl-" + "0" * 32, [stream]), "a-model-name", Names(), is_named=True)  # type: ignore[arg-type]
        size = len(frames.tokens(stream, stream.take()))
        assert 0.1 * limit < size <= 1.1 * limit

    asyncio.run(run())


def test_what_is_asked_again_and_again_is_logged_only_if_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "infer"):
        for handler, status in itertools.product(
            ("health", "metrics", "page", "memory", "debug", "chunks"), (200, 503)
        ):
            _log_request({"method": "GET"}, RequestRecord("r", "/", status), handler, 1.0)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.INFO] * 4 + [logging.INFO] * 4


def test_tokens_that_precede_a_failure_are_sent_and_a_part_is_sent_once() -> None:
    """Also if the failure is known before the response begins; the time of each part counts for its silence."""
    sent: list[Any] = []
    connection: Any = SimpleNamespace(is_writable=True, write_part=lambda part, is_chunked: sent.append(part))

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> tuple[EventStreamResponse, AnswerStream]:
        stream, _ = make_stream()
        answer = Answer("id", [stream])
        frames = CompletionFrames(answer, "m", tokenizer=None, is_named=True)  # type: ignore[arg-type]
        response = EventStreamResponse(answer, ServerConfig("m"), frames)
        for text in "ab":
            stream.push(output(text), 1.0)
        response._last_sent = 0.0
        assert response._write(connection, True, stream)
        assert response._last_sent > 0.0
        stream.push(output("c"), 2.0)
        stream.push(StepOutput("id", None, "", FinishReason.ERROR, error="It broke."), 3.0)
        await response.respond({"http_version": "1.1", "state": {}}, send, send)  # type: ignore[arg-type]
        return response, stream

    asyncio.run(run())
    direct, start, body = sent
    assert [data["choices"][0]["text"] for _, data in events(direct.decode())] == ["a", "b"]
    assert start["status"] == 200
    (_, token), (name, failure) = events(body["body"].decode())
    assert (token["choices"][0]["text"], name, failure["error"]["message"]) == ("c", "error", "It broke.")
    assert not body["more_body"]


@pytest.mark.parametrize(
    ("segments", "recompute", "answers", "num_blends"),
    [
        ([], 0.5, [], 0),
        (["a"], 0.5, [["A"]], 0),
        (["a", "b"], None, [["A", "B"]], 0),
        (["a", "b"], 0.0, [["A", "B"], None, None, "C"], 3),
    ],
)
def test_several_segments_are_blended_as_soon_as_they_have_been_computed(
    segments: list[str], recompute: float | None, answers: list[Any], num_blends: int
) -> None:
    """One that failed meanwhile is not tried again; each question is about the field that names the segments."""
    asked: list[Any] = []
    infos = {name: SegmentInfo(name.lower(), "user", 2, 0, 0) for name in "ABC"}

    async def inquire(*question: Any) -> Any:
        asked.append(question)
        answer = answers[len(asked) - 1]
        return [infos[name] for name in answer] if isinstance(answer, list) else infos.get(answer)

    intake = SimpleNamespace(stopping=lambda: None, facts=SimpleNamespace(segment_refusal=None))
    state = SimpleNamespace(intake=intake, client=SimpleNamespace(inquire=inquire))
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    found = asyncio.run(context(request, segments, "chunks", recompute))
    assert found == ([infos["C"]] if num_blends else [infos[name.upper()] for name in segments])
    blends = [Blend(tuple(segments), recompute or 0.0, is_again=number > 0) for number in range(num_blends)]
    assert asked == [(question, "chunks") for question in (*([Use(tuple(segments))] if segments else ()), *blends)]


@pytest.mark.parametrize("cause", ["disconnected", "shutting_down"])
def test_a_response_that_is_left_aborts_its_answer_and_says_why(cause: str) -> None:
    async def run() -> None:
        stream, abandoned = make_stream()
        answer, has_left = Answer("id", [stream]), asyncio.Event()

        async def receive() -> Any:
            await has_left.wait()
            return {"type": "http.disconnect"}

        response = WholeResponse(answer, ServerConfig("m"), lambda outputs: b"")
        task = asyncio.create_task(response({}, receive, receive))
        await asyncio.sleep(0)
        has_left.set() if cause == "disconnected" else task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (task.cancelled(), abandoned, answer.cause) == (cause == "shutting_down", ["id"], cause)

    asyncio.run(run())


def test_of_tokens_with_one_name_the_likeliest_is_shown() -> None:
    names: Any = SimpleNamespace(token_bytes=lambda token_id: b"a")
    logprobs = TokenLogprobs(-0.5, ((1, -0.5), (2, -1.0)))
    assert completion_logprobs(names, [Scored(2, "a", logprobs)], 0)["top_logprobs"] == [{"a": -0.5}]


def test_what_an_engine_can_do_is_known_from_its_parts() -> None:
    """Also that it has parts for segments, or for limits on thinking, which its KV cache or its model rules out."""
    parts = {"config": None, "model": SimpleNamespace(config=None), "max_seq_len": 4, "load": lambda: None}
    parts["pool"] = SimpleNamespace(request_capacity=3)
    lacks, has = SimpleNamespace(free=None, refusal="Its cache has none."), SimpleNamespace(free=list)
    for more, expected in (
        ({"constraints": None, "limits_thinking": False, "segments": lacks}, (True, False, "Its cache has none.")),
        ({"limits_thinking": True, "segments": has}, (False, True, None)),
        ({"limits_thinking": True}, (False, True, "serve phase 9.1")),
        ({"constraints": None}, (True, False, "serve phase 9.1")),
    ):
        facts = EngineFacts.of(SimpleNamespace(**parts, **more))  # type: ignore[arg-type]
        assert (facts.has_grammars, facts.limits_thinking) == expected[:2]
        assert str(expected[2]) in str(facts.segment_refusal)


def test_a_failed_request_ends_with_the_engines_words() -> None:
    stream, abandoned = make_stream()
    stream.push(StepOutput("id", None, "", FinishReason.ERROR, error="It broke."), 1.0)
    assert stream.error is not None
    assert (stream.error.status_code, stream.error.message, stream.num_tokens) == (500, "It broke.", 0)
    assert abandoned == []  # the engine has forgotten it already


def test_a_refused_request_ends_once_and_there_is_nothing_to_abandon() -> None:
    stream, abandoned = make_stream()
    stream.refuse(ApiError(503, "queue_full", "Full."))
    stream.cancel("late")
    assert stream.error is not None
    assert (stream.error.code, stream.cause, stream.finish_reason) == ("queue_full", None, FinishReason.ERROR)
    assert abandoned == []
    stream, abandoned = make_stream()
    stream.fail(ApiError(500, "internal_error", "A bug."))
    stream.refuse(ApiError(503, "queue_full", "Full."))
    assert (stream.error and stream.error.code, stream.cause) == ("internal_error", "internal_error")
    assert abandoned == ["id"], "the engine has it still"


def test_metrics_take_only_labels_of_small_sets() -> None:
    metrics = ServerMetrics("m")
    for handler in ("completions", "/../../etc/passwd", "x" * 1000):
        metrics.on_http(handler, 404)
    text = metrics.exposition().decode()
    assert 'handler="other",status="404"} 2.0' in text
    assert "passwd" not in text
    assert "_created" not in text


def test_gaps_between_tokens_are_counted_as_the_librarys_histogram_counts() -> None:
    metrics = ServerMetrics("m")
    library = Histogram("infer:inter_token_latency_seconds", "", ["model_name"], registry=None, buckets=SHORT)
    gaps = {0.0: 3, 0.0005: 1, 0.00051: 2, 0.02: 64, 10.0: 1, 11.0: 2}
    metrics.on_gaps(gaps)
    for seconds, count in gaps.items():
        for _ in range(count):
            library.labels("m").observe(seconds)
    (expected,), (found,) = library.collect(), metrics._gaps.collect()
    values = {(sample.name, *sample.labels.values()): sample.value for sample in found.samples}
    assert values == pytest.approx({(one.name, *one.labels.values()): one.value for one in expected.samples})
    assert 'infer:generation_tokens_total{model_name="m"} 73.0' in metrics.exposition().decode()


def test_errors_are_ascii_whatever_they_repeat() -> None:
    body = ApiError(422, "invalid_value", "bad \ud800 \u2028", param="x").body()
    assert body.isascii()
    assert json.loads(body)["error"]["param"] == "x"


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 cannot be bound"):
            bind("127.0.0.1", port)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 512 * 1024
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) > 0
    with pytest.raises(ConfigError, match=r"Port 80 of no\.\.host cannot be bound"):
        bind("no..host", 80)


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_an_address_beyond_this_machine_is_exposed(host: str, expected: bool) -> None:
    with bind(host, 0) as bound:
        assert is_exposed(bound) is expected
        assert address_of(bound) == "http://{}:{}".format(*bound.getsockname())
    ipv6: Any = SimpleNamespace(getsockname=lambda: ("::1", 80, 0, 0))
    assert (address_of(ipv6), is_exposed(ipv6)) == ("http://[::1]:80", False)


@pytest.mark.parametrize(
    ("host", "api_key", "is_open"), [("0.0.0.0", None, 1), ("0.0.0.0", "k", 0), ("127.0.0.1", None, 0)]
)
def test_a_server_says_where_it_listens_and_whether_others_may_send_requests(
    host: str, api_key: str | None, is_open: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has as many connections as descriptors; after it, a signal is handled as before."""
    config, served, before = ServerConfig("m", api_key=api_key), list[Any](), signal.getsignal(signal.SIGTERM)
    app: Any = SimpleNamespace(state=SimpleNamespace(client=SimpleNamespace(crash="Rank 1 is lost.")))
    server = SimpleNamespace(has_lost_engine=False)
    server.run = lambda sockets: served.append((sockets, signal.getsignal(signal.SIGTERM) is not before))
    monkeypatch.setattr(process, "Server", lambda *given: served.append(given) or server)
    monkeypatch.setattr(process, "_affordable", lambda wanted: wanted - 1)
    monkeypatch.setattr(process, "gc", SimpleNamespace(collect=list, freeze=list))
    monkeypatch.setattr(process, "sys", SimpleNamespace(setswitchinterval=served.append))
    with bind(host, 0) as bound, caplog.at_level(logging.INFO, "infer"):
        process.run(app, config, bound, model="m")
        affordable = dataclasses.replace(config, max_connections=config.max_connections - 1)
        assert served == [(app, affordable), process.SWITCH_INTERVAL, ([bound], True)]
        fields = [record.__dict__["fields"] for record in caplog.records]
        assert fields == [{}] * is_open + [{"url": address_of(bound), "model": "m"}]
        server.has_lost_engine = True
        with pytest.raises(RankError, match="Rank 1 is lost"):
            process.run(app, config, bound)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_is_served_by_its_own_name_however_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in ((".", tmp_path.name), ("..", tmp_path.parent.name), ("org/model", "org/model")):
        assert model_name(folder) == name


def test_the_limits_of_answers_without_one_are_given_together() -> None:
    for value, expected in ((None, {}), ("1", {1}), ("4096", {4096}), ("context", {None})):
        assert _default_tokens(value) == {name: one for one in expected for name in ("max_tokens", "max_chat_tokens")}
    for value in ("0", "-1", "1.5", "٣", "", "all"):
        with pytest.raises(ConfigError, match="at least 1, or context"):
            _default_tokens(value)


def test_a_list_on_the_command_line_has_no_empty_parts() -> None:
    assert (listed(None), listed(" a b,c ,, ")) == ((), ("a b", "c"))


@pytest.mark.parametrize(
    ("limit", "system", "served", "left"),
    [
        ((1024, 4096), 4096, 2048, 2048 + 100),  # Linux: a hard limit
        ((256, 512), 512, 412, 512),
        ((256, resource.RLIM_INFINITY), 61440, 2048, 2048 + 100),  # macOS: none, and a low soft limit
        ((256, resource.RLIM_INFINITY), 1000, 156, 256),
        ((8192, resource.RLIM_INFINITY), 8192, 2048, 8192),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 8192, 2048, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_allows(
    limit: tuple[int, int], system: int, served: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [limit]

    def change(kind: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > system:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(process.psutil.Process, "num_fds", lambda _: 100 - process.SPARE_DESCRIPTORS)
    monkeypatch.setattr(process.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(process.resource, "setrlimit", change)
    assert process._affordable(2048) == served
    assert limits[-1] == (left, limit[1])
