"""Clients that would hold up the others, and an engine that is killed: sockets against ``infer serve`` as a process."""

import asyncio
import contextlib
import json
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.server_process import MODEL, ServerProcess
from tests.waiting import PATIENCE, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MEGABYTE = 10**6
DELAY_SECONDS, ROUNDS = 0.3, 5


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with few descriptors; at its end, two clients have not sent all of their requests."""
    log = tmp_path_factory.mktemp("limits") / "log"
    running = ServerProcess(folder, log, "--engine-thread", descriptors=256)
    assert "there is no API key" not in log.read_text()
    yield running
    with connected(running, HEAD + b"Content-Length: 1000\r\n\r\n{"), connected(running, b"GET /heal"):
        with running.client() as client:  # whose request is read after those
            client.get("/health")
        assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


@contextlib.contextmanager
def connected(server: ServerProcess, *parts: bytes) -> Iterator[socket.socket]:
    """A connection that has sent ``parts``."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE) as connection:
        for part in parts:
            connection.sendall(part)
        yield connection


ENDLESS = {
    "300 MB of headers": (HEAD, b"".join(b"X-%06d: %s\r\n" % (i, b"a" * 988) for i in range(1000)), 300, b"431"),
    "a URL of 100 MB": (b"GET /", b"a" * MEGABYTE, 100, b"414"),
}


@pytest.mark.parametrize(("start", "part", "times", "status"), ENDLESS.values(), ids=ENDLESS)
def test_a_head_without_end_is_cut_off(
    start: bytes, part: bytes, times: int, status: bytes, server: ServerProcess
) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    num_sent, answer = 0, b""
    with connected(server, start) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(times):
                connection.sendall(part)
                num_sent += 1
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(4096)
    assert num_sent < 20
    assert answer[9:12] in (status, b"")  # a reset may overtake it
    assert psutil.Process(server.process.pid).memory_info().rss - before < 30 * MEGABYTE
    assert server.events("connection refused")[-1]["status"] == int(status)


def test_few_descriptors_make_room_for_few_connections(server: ServerProcess) -> None:
    """That those without a request are closed after a while, `test_connections` proves with shorter limits."""
    (warning,) = server.events("fewer connections than configured")
    most = warning["max_connections"]
    assert 100 < most < 256
    halves = (b"", b"GET /health HTTP/1.1\r\n", HEAD + b"X-A: b\r\n")
    with contextlib.ExitStack() as connections:
        for index in range(most):
            connections.enter_context(connected(server, halves[index % 3]))
        with connected(server) as refused:
            answer = refused.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert "too_many_connections" in [event["error"] for event in server.events("connection refused")]

    def has_room() -> bool:
        with contextlib.suppress(httpx.TransportError), server.client() as client:
            return client.get("/health").status_code == 200
        return False  # closed before the request was read

    wait_until(has_room)


def test_when_the_engine_is_killed_its_requests_have_failed_and_nothing_runs(folder: Path, tmp_path: Path) -> None:
    server = ServerProcess(folder, tmp_path / "log", "--engine-process", "--host", "0.0.0.0")
    assert "there is no API key" in server.log.read_text()
    body = {"model": MODEL, "prompt": "once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    try:
        children = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = (child for child in children if "spawn_main" in " ".join(child.cmdline()))
        with server.client() as client, contextlib.ExitStack() as streams:
            opened = [
                streams.enter_context(client.stream("POST", "/v1/completions", json=body)).iter_lines()
                for _ in range(2)
            ]
            for lines in opened:
                next(lines)
            assert client.get("/health").json()["num_requests_running"] == 2
            engine.send_signal(signal.SIGKILL)
            for lines in opened:
                assert '"code":"engine_error"' in "\n".join(lines)
            health = client.get("/health")
            assert health.status_code == 503
            assert health.json() == {
                "status": "the engine has stopped",
                "message": "The engine has stopped (the engine's process ended with exit code -9); restart the server.",
                "live": False,
                "ready": False,
                "num_requests_running": 0,
                "num_requests_waiting": 0,
                "kv_cache_usage": 0.0,
            }
            metrics = dict(
                line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line.startswith("infer:")
            )
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_alive"):
                assert metrics[f'infer:{name}{{model_name="{MODEL}"}}'] == "0.0"
            for reason, count in (("error", "2.0"), ("abort", "0.0")):
                name = f'infer:request_success_total{{finished_reason="{reason}",model_name="{MODEL}"}}'
                assert metrics[name] == count
    finally:
        assert server.end() == 0


@pytest.mark.measured
@pytest.mark.demo
def test_large_prompts_do_not_hold_up_a_stream(demo_folder: Path, tmp_path: Path) -> None:
    """Eight prompts of 1.9 MB at once: the stream's longest gap between two tokens, beside that of a quiet second."""
    server = ServerProcess(demo_folder, tmp_path / "log")
    large = json.dumps({"model": demo_folder.name, "prompt": "The quick brown fox. " * 90_000, "max_tokens": 4})

    async def delay() -> float:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
            times: list[float] = []

            async def stream() -> None:
                body = {"model": demo_folder.name, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
                async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                    async for _ in response.aiter_raw():
                        times.append(time.perf_counter())

            streaming = asyncio.create_task(stream())
            while len(times) < 5 or times[-1] - times[1] < 1:
                await asyncio.sleep(0.01)
            headers = {"content-type": "application/json"}
            attacks = [client.post("/v1/completions", content=large, headers=headers) for _ in range(8)]
            attacked = len(times)
            assert {attack.status_code for attack in await asyncio.gather(*attacks)} == {422}
            await asyncio.sleep(0.5)
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
            gaps = [after - before for before, after in pairwise(times)]
            return max(gaps[attacked - 1 :]) - max(gaps[1 : attacked - 1])

    try:
        delays = [asyncio.run(delay()) for _ in range(ROUNDS)]
    finally:
        assert server.end() == 0
    assert statistics.median(delays) < DELAY_SECONDS, delays
