"""Full queues, clients that leave, clients that do not read, silence."""

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httptools
import pytest

from tests.unit.server.echo import ENDLESS, EchoEngine, endless, everything, serving, unread
from tests.unit.server.exchange import chat, completion, events, samples
from tests.waiting import PATIENCE, wait_until


def test_a_request_that_was_submitted_waits_until_a_step_has_counted_it(folder: Path) -> None:
    engine = endless(folder, max_batch_size=2)
    with serving(engine) as running, running.client() as client:

        def waiting() -> int:
            return client.get("/health").json()["num_requests_waiting"]

        with unread(running, "/v1/completions", completion(**ENDLESS)):
            with engine.held():
                wait_until(lambda: waiting() == 1)
            wait_until(lambda: waiting() == 0)
            assert client.get("/health").json()["num_requests_running"] == 1
        # The engine has nothing to do once that client has left, so no step tells the load.
        wait_until(lambda: client.get("/health").json()["num_requests_running"] == 0)
        assert client.get("/debug/engine").json()["load"]["num_running"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", completion(**ENDLESS)),
        ("/v1/chat/completions", chat(**ENDLESS)),
        ("/v1/chat/completions", chat(**ENDLESS, stream=True)),
    ],
    ids=["completion", "chat", "chat stream"],
)
def test_a_client_that_leaves_frees_its_region_within_two_steps(path: str, body: dict[str, Any], folder: Path) -> None:
    engine = endless(folder)
    with serving(engine) as running, running.client() as client:
        with unread(running, path, body):
            wait_until(lambda: bool(engine.running) and engine.num_steps > 2)
        wait_until(lambda: running.app.state.client.num_open_requests == 0)
        assert client.get("/health").status_code == 200  # by now the engine has received it
        seen = engine.num_steps
        wait_until(lambda: not engine.running)
        assert engine.num_steps - seen <= 2
        assert engine.pool.audit() == []
        assert samples(client)["infer:request_success_total{finished_reason=abort}"] == 1


def test_a_client_that_waits_in_the_queue_may_leave_too(folder: Path) -> None:
    engine = endless(folder, max_batch_size=1)
    with serving(engine) as running, unread(running, "/v1/completions", completion(**ENDLESS)):
        wait_until(lambda: len(engine.running) == 1)
        with unread(running, "/v1/completions", completion()):  # which has no headers yet
            wait_until(lambda: len(engine.waiting) == 1)
        wait_until(lambda: not engine.waiting)
        assert len(engine.running) == 1


@pytest.mark.parametrize(("logprobs", "most"), [(None, 2**18), (20, 2**18), (20, 2**30)])
def test_a_reader_that_does_not_read_is_bounded_and_cut_off(
    logprobs: int | None, most: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the number of its unread bytes or, if that may be larger, by the time that it does not read."""
    engine = endless(folder)
    engine.step_seconds = 0.001  # the test has to look meanwhile
    with serving(engine, send_timeout=1.0, max_unread_bytes=most) as running, caplog.at_level(logging.INFO, "infer"):
        body = completion(**ENDLESS, n=4, logprobs=logprobs)
        with unread(running, "/v1/completions", body, receive_buffer=4096) as connection:
            wait_until(lambda: bool(engine.running))
            largest = 0

            def is_cut_off() -> bool:
                nonlocal largest
                for stream in list(running.app.state.client._streams.values()):
                    largest = max(largest, stream._unread_bytes)
                for protocol in list(running.server.server_state.connections):
                    largest = max(largest, protocol.transport.get_write_buffer_size())
                return not running.server.server_state.connections

            wait_until(is_cut_off)
            assert 0 < largest <= most + 2**18
            everything(connection)
        wait_until(lambda: not engine.running and engine.pool.audit() == [])  # the engine's thread aborts it
        wait_until(lambda: "request" in caplog.messages)
    (line,) = (record.__dict__["fields"] for record in caplog.records if record.message == "request")
    assert line["cause"] == "slow_reader"


def test_a_reader_that_pauses_delays_no_other_and_gets_everything_in_its_order(folder: Path) -> None:
    engine = EchoEngine(folder, max_seq_len=2**31)
    with serving(engine, max_unread_bytes=2**24, send_timeout=PATIENCE) as running, running.client() as client:
        body = completion("abc", max_tokens=4000, ignore_eos=True)
        with unread(running, "/v1/completions", body, receive_buffer=4096) as connection:
            wait_until(lambda: bool(engine.running))
            (protocol,) = running.server.server_state.connections
            wait_until(lambda: protocol.flow.write_paused)
            other = client.post("/v1/completions", json=completion(max_tokens=100, ignore_eos=True))
            assert protocol.flow.write_paused
            assert [name for name, _ in events(other.text)] == ["token"] * 100 + ["done"]
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                answer += connection.recv(2**16)
        parts: list[bytes] = []
        httptools.HttpResponseParser(SimpleNamespace(on_body=parts.append)).feed_data(answer)
        frames = events(b"".join(parts).decode())
        assert [name for name, _ in frames] == ["token"] * 4000 + ["done"]
        assert "".join(data["choices"][0]["text"] for _, data in frames) == ("abc" * 1334)[:4000]


def test_silence_is_broken_by_comments(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine, keep_alive=0.1) as running, running.client() as client, contextlib.ExitStack() as silence:
        silence.enter_context(engine.held())
        with client.stream("POST", "/v1/completions", json=completion(max_tokens=2)) as response:
            parts, text = response.iter_text(), ""
            while text.count(": keep-alive\n\n") < 3:
                text += next(parts)
            silence.close()
            text += "".join(parts)
    assert [name for name, _ in events(text)] == ["token", "token", "done"]
