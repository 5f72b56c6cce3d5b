"""The end of a server: streams may finish in the grace time, and end with an error event after it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.unit.server.echo import EchoEngine, serving, wait_until
from tests.unit.server.exchange import chat, completion, error_of, events


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
            running.call(lambda: running.server.handle_exit(15, None))
            ended = {name: "".join(stream.iter_text()) for name, stream in (("short", short), ("long", long))}
            spoken = "".join(talk.iter_text())
        assert [name for name, _ in events(ended["short"])] == ["token"] * 20 + ["done"]
        names = [name for name, _ in events(ended["long"])]
        assert set(names[:-1]) == {"token"}
        assert names[-1] == "error"
        assert events(ended["long"])[-1][1]["error"]["code"] == "shutting_down"
        assert [data for _, data in events(spoken)][-1] == "[DONE]"
        assert events(spoken)[-2][1]["error"]["code"] == "shutting_down"
        with pytest.raises(httpx.TransportError):
            other.get("/health")


def test_a_request_that_still_waits_may_be_sent_elsewhere(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=1)
    engine.step_seconds = 0.02
    with (
        serving(engine, grace=1.0, retry_after=5) as running,
        running.client() as client,
        ThreadPoolExecutor(1) as aside,
        client.stream("POST", "/v1/completions", json=completion(max_tokens=4000)) as first,
    ):
        waiting = aside.submit(client.post, "/v1/completions", json=completion())
        wait_until(lambda: len(engine.waiting) == 1)
        running.call(lambda: running.server.handle_exit(15, None))
        refused = waiting.result()
        assert events("".join(first.iter_text()))[-1][0] == "error"
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert error_of(refused)["code"] == "shutting_down"
