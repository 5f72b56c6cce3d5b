"""The end of a server: streams may finish in the grace time, and end with an error event after it."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shared.server import process
from tests.unit.server.echo import ENDLESS, EchoEngine, Running, endless, serving
from tests.unit.server.exchange import chat, completion, error_of, events
from tests.waiting import PATIENCE, wait_until


@contextlib.contextmanager
def short_grace(engine: EchoEngine, **settings: Any) -> Iterator[Running]:
    """A server that ends its answers soon after a signal, and does not cut off those whose last event comes late."""
    with serving(engine, grace=0.2, **settings) as running:
        running.server.config.timeout_graceful_shutdown = PATIENCE  # type: ignore[assignment]
        yield running


def test_running_streams_may_end_in_the_grace_time_and_no_request_is_taken(folder: Path) -> None:
    engine = endless(folder)
    with serving(engine, grace=PATIENCE) as running, running.client() as client, running.client() as other:
        assert other.get("/health").status_code == 200
        with (
            client.stream("POST", "/v1/completions", json=completion(**ENDLESS)) as long,
            client.stream("POST", "/v1/completions", json=completion(max_tokens=20)) as short,
        ):
            running.end()
            assert [name for name, _ in events("".join(short.iter_text()))] == ["token"] * 20 + ["done"]
            wait_until(lambda: is_gone(other))
            seen = engine.num_steps
            wait_until(lambda: engine.num_steps > seen)
            assert not long.is_closed


def is_gone(client: httpx.Client) -> bool:
    try:
        client.get("/health/live")
    except httpx.TransportError:
        return True
    return False


def test_streams_that_outlast_the_grace_time_end_with_an_error_event(folder: Path) -> None:
    with short_grace(endless(folder)) as running, running.client() as client:
        with (
            client.stream("POST", "/v1/completions", json=completion(**ENDLESS)) as long,
            client.stream("POST", "/v1/chat/completions", json=chat(**ENDLESS, stream=True)) as talk,
        ):
            running.end()
            ended, spoken = (events("".join(stream.iter_text())) for stream in (long, talk))
        names = [name for name, _ in ended]
        assert (set(names[:-1]), names[-1]) == ({"token"}, "error")
        assert ended[-1][1]["error"]["code"] == "shutting_down"
        assert spoken[-2][1]["error"]["code"] == "shutting_down"
        assert spoken[-1][1] == "[DONE]"


def test_a_request_that_still_waits_may_be_sent_elsewhere(folder: Path) -> None:
    engine = endless(folder, max_batch_size=1)
    with (
        short_grace(engine, retry_after=5) as running,
        running.client() as client,
        ThreadPoolExecutor(1) as aside,
        client.stream("POST", "/v1/completions", json=completion(**ENDLESS)) as first,
    ):
        waiting = aside.submit(client.post, "/v1/completions", json=completion())
        wait_until(lambda: len(engine.waiting) == 1)
        running.end()
        refused = waiting.result()
        assert events("".join(first.iter_text()))[-1][0] == "error"
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert error_of(refused)["code"] == "shutting_down"


@pytest.mark.parametrize(("grace", "seconds"), [(30.0, 29.0), (5.0, 4.0), (1.0, 0.8)])
def test_running_requests_are_ended_shortly_before_the_grace_time_is_over(
    grace: float, seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    with serving(EchoEngine(folder), grace=grace) as running:
        assert running.server.config.timeout_graceful_shutdown == grace, "the rest is cut off then"
        loop = SimpleNamespace(call_later=lambda *call: calls.append(call))
        with monkeypatch.context() as patch:
            patch.setattr(process, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
            running.server._drain()
            running.server._drain()  # a second signal changes nothing
        ((delay, end_all, error),) = calls
    assert delay == pytest.approx(seconds)
    assert end_all == running.app.state.client.end_all
    assert (error.status_code, error.code, error.headers) == (503, "shutting_down", {"Retry-After": "1"})
