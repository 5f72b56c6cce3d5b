"""Connections that send no request, half of one, or one that is too large; and requests that are refused unread."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.server.echo import ENDLESS, EchoEngine, Running, connected, endless, everything, serving, unread
from tests.unit.server.exchange import completion, error_of, samples
from tests.waiting import wait_until

SECONDS = 0.4
PATIENT = 600.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LIMITS = {"head_timeout": SECONDS, "max_head_bytes": 4096, "max_url_bytes": 1024, "max_connections": 6}


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Running]:
    """A server with small limits."""
    with serving(EchoEngine(folder), **LIMITS, api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[Running]:
    """The same that waits for its clients, however slow they are."""
    with serving(EchoEngine(folder), **LIMITS | {"head_timeout": PATIENT}) as running:
        yield running


def head(num_url_bytes: int, num_bytes: int, connection: bytes = b"keep-alive") -> bytes:
    """A request whose URL, names and values of headers have so many bytes."""
    url = b"/health/live?".ljust(num_url_bytes, b"a")
    rest = b"a" * (num_bytes - num_url_bytes - len(b"HostxConnectionX-Long") - len(connection))
    return b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: %b\r\nX-Long: %b\r\n\r\n" % (url, connection, rest)


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of a response that ends its connection, after a look at its shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["connection"] == "close"
    assert len(headers["x-request-id"]) == 32
    response = httpx.Response(200, headers={"content-type": headers["content-type"]}, content=body)
    return int(status.split()[1]), error_of(response)["code"]


HALVES = {"a request line": b"GET /hea", "headers": HEAD + b"X-A: b\r\n", "a second request": LIVE + b"GET /hea"}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_half_a_request_is_refused_after_a_while(sent: bytes, small: Running) -> None:
    with connected(small, sent) as connection:
        answer = everything(connection)
    assert refusal(answer[answer.rindex(b"HTTP/1.1 ") :]) == (408, "headers_timeout")


def test_a_request_may_come_in_pieces_and_after_a_silence(patient: Running) -> None:
    """While the time for it is not over: the other server closes what it serves no request on."""
    with connected(patient) as quiet, connected(patient, LIVE[:9]) as slow, patient.client() as client:
        for _ in range(3):
            assert client.get("/health/live").status_code == 200
        for connection, rest in ((slow, LIVE[9:]), (quiet, LIVE)):
            connection.sendall(rest)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_request_that_has_come_is_taken_however_late_the_server_reads_it(patient: Running) -> None:
    """A machine that is too busy to read in time has bytes in its socket when the time is over."""
    is_blocked, may_go_on = threading.Event(), threading.Event()
    with connected(patient, LIVE[:9]) as connection:
        wait_until(lambda: any(each._is_in_head for each in list(patient.server.server_state.connections)))
        (late,) = [each for each in patient.server.server_state.connections if each._is_in_head]
        patient.loop.call_soon_threadsafe(lambda: (is_blocked.set(), may_go_on.wait(), late._out_of_time()))
        assert is_blocked.wait(PATIENT)
        connection.sendall(LIVE[9:])
        may_go_on.set()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n", LIVE, LIVE + b"\r\n", HEAD + b"Content-Length: 9\r\n\r\n123"])
def test_silence_closes_a_connection(sent: bytes, small: Running) -> None:
    """The last request has no key and is refused before its body."""
    with connected(small, sent) as connection:
        answer = everything(connection)
    assert answer.count(b"HTTP/1.1 ") == int(sent not in (b"", b"\r\n"))


def test_a_head_that_drips_has_no_more_time(small: Running) -> None:
    def drip(connection: socket.socket) -> None:
        """For more than a minute, unless the connection is closed."""
        for byte in HEAD + b"x" * 3500:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    with connected(small, LIVE[:4]) as connection, pytest.raises(OSError):
        drip(connection)


def test_each_head_of_a_connection_may_have_all_the_bytes_that_one_may_have(patient: Running) -> None:
    with connected(patient, head(1024, 4096), head(20, 4096), head(1024, 4096, b"close")) as connection:
        assert everything(connection).count(b"HTTP/1.1 200 ") == 3


MORE_THAN_A_READ = 600_000  # uvloop reads 256 KiB at most, and the limit counts from the second read on
TOO_LONG = {
    "a URL": (head(1025, 1100), (414, "url_too_long")),
    "a header": (head(20, 4097), (431, "headers_too_large")),
    "a header without end": (HEAD + b"X-Long: " + b"a" * MORE_THAN_A_READ, (431, "headers_too_large")),
    "many headers": (HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(900)) + b"\r\n", (431, "headers_too_large")),
    "line ends": (b"\r\n" * 4000, (431, "headers_too_large")),
    "a trailer": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Long: " + b"a" * MORE_THAN_A_READ,
        (431, "headers_too_large"),
    ),
}
MALFORMED = (
    b"hello\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
)
REFUSED = TOO_LONG | {repr(sent): (sent, (400, "invalid_http")) for sent in MALFORMED}


@pytest.mark.parametrize(("sent", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_request_is_refused_like_any_other(
    sent: bytes, expected: tuple[int, str], patient: Running, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"infer:http_requests_total{{handler=other,status={expected[0]}}}"
    with caplog.at_level(logging.INFO, "infer"), patient.client() as client:
        before = samples(client).get(name, 0)
        with connected(patient) as connection:
            with contextlib.suppress(ConnectionError):  # the rest is not read
                for start in range(0, len(sent), 1000):
                    connection.sendall(sent[start : start + 1000])
            assert refusal(everything(connection)) == expected
        assert samples(client)[name] == before + 1
        fields: Any = [record.__dict__["fields"] for record in caplog.records if record.message == "connection refused"]
        assert [(line["status"], line["error"]) for line in fields] == [expected]
        assert client.get("/debug/engine").json()["num_open_requests"] == 0


def test_a_connection_too_many_is_told_so(patient: Running, caplog: pytest.LogCaptureFixture) -> None:
    wait_until(lambda: not patient.server.server_state.connections)  # of the tests before
    with caplog.at_level(logging.INFO, "infer"), contextlib.ExitStack() as open_connections:
        taken = [open_connections.enter_context(connected(patient, LIVE)) for _ in range(LIMITS["max_connections"])]
        assert all(b"200 OK" in each.recv(4096) for each in taken)
        with connected(patient) as another:
            answer = everything(another)
        assert refusal(answer) == (503, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert "connection refused" in caplog.messages
        taken[0].close()
        wait_until(lambda: len(patient.server.server_state.connections) < LIMITS["max_connections"])
        with patient.client() as client:
            assert client.get("/health/live").status_code == 200


def test_rubbish_behind_a_request_does_not_enter_its_answer(folder: Path) -> None:
    engine = endless(folder)
    body = json.dumps(completion(**ENDLESS, stream=True)).encode()
    with serving(engine) as running:
        with connected(running, HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) as connection:
            answer = connection.recv(65536)
            connection.sendall(b"rubbish\r\n\r\n")
            answer += everything(connection)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"invalid_http" not in answer
        wait_until(lambda: not engine.running)


def test_a_refused_client_that_does_not_read_is_cut_off(folder: Path) -> None:
    engine = endless(folder)
    engine.step_seconds = 0.0
    body = completion(**ENDLESS, stream=True)
    with (
        serving(engine, head_timeout=SECONDS, send_timeout=PATIENT, max_unread_bytes=2**30) as running,
        unread(running, "/v1/completions", body, receive_buffer=4096) as connection,
    ):
        wait_until(lambda: any(each.flow.write_paused for each in list(running.server.server_state.connections)))
        connection.sendall(b"rubbish\r\n\r\n")
        wait_until(lambda: not running.server.server_state.connections)


def test_a_request_that_follows_another_at_once_has_all_its_time(folder: Path) -> None:
    """No connection is timed while it serves a request, also if that has come before the answer to the one before."""
    engine = EchoEngine(folder)
    body = json.dumps(completion("ab", stream=False)).encode()
    sent = LIVE + HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with serving(engine) as running, engine.held(), connected(running, sent) as connection:
        wait_until(lambda: engine.is_held)
        (protocol,) = running.server.server_state.connections
        assert protocol._head_timer is None
        engine.may_step.set()
        answer = b""
        while not answer.endswith(b"}}"):
            answer += (received := connection.recv(2**16))
            assert received, "the connection was closed"
        assert answer.count(b"HTTP/1.1 200 ") == 2
        wait_until(lambda: protocol._head_timer is not None)


def test_a_connection_whose_answers_are_not_read_is_closed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(EchoEngine(folder), send_timeout=SECONDS) as running:
        schema = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
        with connected(running, schema * 300) as connection:
            assert connection.recv(9) == b"HTTP/1.1 "
            wait_until(lambda: not running.server.server_state.connections)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_key_is_looked_at_before_the_body(folder: Path) -> None:
    with serving(EchoEngine(folder), api_key="secret") as running, running.client() as client:
        for extra in (b"", b"Expect: 100-continue\r\n", b"Authorization: Bearer wrong\r\n"):
            with connected(running, HEAD + extra + b"Content-Length: 1000000\r\n\r\n") as connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        for scheme in ("bearer", "BEARER", "Bearer "):
            assert client.get("/v1/models", headers={"authorization": f"{scheme} secret"}).status_code == 200
        for wrong in ("basic secret", "bearer", "bearer secret2", "bearersecret"):
            assert client.get("/v1/models", headers={"authorization": wrong}).status_code == 401


def test_only_the_allowed_hosts_are_answered(folder: Path) -> None:
    hosts = ("localhost", "[::1]", "*.Example.com")
    with serving(EchoEngine(folder), allowed_hosts=hosts) as running, running.client() as client:
        for host in ("localhost", "LOCALHOST:8000", "[::1]:80", "[::1]", "a.example.com:1", "b.a.example.com"):
            assert client.get("/health", headers={"host": host}).status_code == 200, host
        for host in ("evil.test", "example.com", "localhost.evil.test", "evilexample.com", "localhost:x", ""):
            refused = client.get("/health", headers={"host": host})
            assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_host"), host
        with connected(running, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.test\r\n\r\n") as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


COMPLEX = {
    "values": {"prompt": [7] * 140_000},
    "lists": {"prompt": [[]] * 140_000},
    "keys": {"metadata": {f"{index}": 1 for index in range(8200)}},
    "keys that look like text": {"metadata": {f'\\":"{index}': 1 for index in range(8200)}},
}


@pytest.mark.parametrize("extra", COMPLEX.values(), ids=COMPLEX)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(extra: dict[str, Any], client: httpx.Client) -> None:
    refused = client.post("/v1/completions", json=completion() | extra)
    assert (refused.status_code, error_of(refused)["code"]) == (413, "body_too_complex")


def test_text_may_hold_as_many_commas_and_brackets_as_it_likes(client: httpx.Client) -> None:
    for text in (',[{:"' * 60_000, "\\" * 131_073 + '"' * 140_000, '\\",' * 140_000):
        response = client.post("/v1/completions", json=completion("ab") | {"user": text})
        assert response.status_code == 200, response.text


def test_a_body_is_utf_8(client: httpx.Client) -> None:
    content = json.dumps(completion()).encode("utf-16")
    refused = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_json")


def test_a_body_without_end_does_not_delay_the_end(folder: Path) -> None:
    with serving(EchoEngine(folder), grace=PATIENT, body_timeout=PATIENT, head_timeout=PATIENT) as running:
        with connected(running, HEAD + b"Content-Length: 1000\r\n\r\n{") as connection, connected(running, LIVE[:9]):
            wait_until(lambda: bool(running.server.server_state.tasks))
            running.end()
            answer = everything(connection)
        assert refusal(answer) == (503, "shutting_down")
