"""Pages of other sites, a base path below which a proxy serves, and clients of HTTP/1.0, as older proxies are."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.server.echo import POISON, EchoEngine, Running, connected, everything, serving
from tests.unit.server.exchange import completion, events
from tests.waiting import wait_until

ORIGIN = "https://a.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization",
}


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    with serving(EchoEngine(folder), root_path="/llm", allowed_origins=(ORIGIN,), api_key="k") as running:
        yield running


@pytest.fixture(scope="module")
def proxied(running: Running) -> Iterator[httpx.Client]:
    with running.client() as client:
        yield client


@pytest.mark.parametrize("base", ["/llm", ""], ids=["kept", "stripped"])
def test_a_server_below_a_base_path(base: str, proxied: httpx.Client) -> None:
    key = {"authorization": "Bearer k"}
    assert proxied.get(f"{base}/").status_code == 200
    assert proxied.get(f"{base}/page/main.js").status_code == 200
    assert proxied.get(f"{base}/v1/models").status_code == 401, "the key guards the API"
    assert proxied.get(f"{base}/v1/models", headers=key).json()["data"][0]["id"] == "echo"
    assert proxied.post(f"{base}/v1/completions", json=completion(), headers=key).status_code == 200
    moved = proxied.get(f"{base}/health/").headers["location"]
    assert moved == "/llm/health", "without a host, which a proxy would replace, and add the path once more"
    assert proxied.get(f"{base}/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert proxied.get("/llmv1/models", headers=key).status_code == 404


def test_the_log_has_paths_below_the_base_path(proxied: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    paths = {"/llm/nowhere": "/nowhere", "/nowhere": "/nowhere", "/llm": "/llm", "/llmv1/models": "/llmv1/models"}

    def logged() -> dict[str, str]:
        """Without the lines of earlier tests, which may come after their responses."""
        lines: list[Any] = [record.__dict__["fields"] for record in caplog.records]
        return {line["request_id"]: line["path"] for line in lines if len(line["request_id"]) == 1}

    with caplog.at_level(logging.INFO, "infer"):
        for number, path in enumerate(paths):
            assert proxied.get(path, headers={"x-request-id": str(number)}).status_code == 404
        wait_until(lambda: len(logged()) == len(paths))
    assert logged() == {str(number): path for number, path in enumerate(paths.values())}


def test_a_page_of_another_site_is_let_in_by_its_origin(proxied: httpx.Client, client: httpx.Client) -> None:
    asked = proxied.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN), "it needs no key"
    assert asked.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    refused = proxied.get("/v1/models", headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN), "errors are read too"
    assert refused.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After"
    for other in (
        proxied.get("/health", headers={"origin": "https://b.example"}),
        client.options("/health", headers=PREFLIGHT),
    ):
        assert "access-control-allow-origin" not in other.headers, "of another site, and by default"


@pytest.mark.parametrize(
    ("allowed", "named", "told"),
    [
        ((ORIGIN,), None, ORIGIN),
        ((ORIGIN,), "https://b.example", None),
        ((ORIGIN, "https://b.example"), None, None),
        ((ORIGIN, "https://b.example"), "https://b.example", "https://b.example"),
        (("*",), "https://b.example", "*"),
        ((), ORIGIN, None),
    ],
)
def test_a_refusal_without_a_request_can_be_read_by_the_same_pages(
    allowed: tuple[str, ...], named: str | None, told: str | None, folder: Path
) -> None:
    origin = b"" if named is None else b"Origin: %b\r\n" % named.encode()
    head = b"GET / HTTP/1.1\r\n%bX-Long: %b\r\n\r\n" % (origin, b"a" * 5000)
    with (
        serving(EchoEngine(folder), allowed_origins=allowed, max_head_bytes=4096) as running,
        connected(running, head) as connection,
    ):
        answer = everything(connection).partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert " 431 " in answer[0]
    found = dict(line.split(": ", 1) for line in answer if line.startswith(("access-control-", "vary")))
    exposed = "X-Request-Id, Retry-After"
    names = ("access-control-allow-origin", "vary", "access-control-expose-headers")
    assert found == ({} if told is None else dict(zip(names, (told, "Origin", exposed), strict=True)))


@pytest.mark.parametrize("prompt", ["ab", "a" + POISON], ids=["complete", "failed"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_ends_with_the_connection_in_http_1_0(prompt: str, version: bytes, echo: Running) -> None:
    body = json.dumps(completion(prompt, stream=True)).encode()
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n" % version
    sent = head + b"Connection: %b\r\n" % (b"keep-alive" if version == b"1.0" else b"close")
    with connected(echo, sent + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) as connection:
        answer, _, received = everything(connection).partition(b"\r\n\r\n")
    is_chunked = version == b"1.1"
    assert (b"transfer-encoding: chunked" in answer) == is_chunked
    assert b"connection: close" in answer
    if is_chunked:
        return
    *frames, (_, last) = events(received.decode())
    assert (last == "[DONE]") == (prompt == "ab"), "an answer that failed does not end as a complete one"
    texts = [data["choices"][0]["text"] for _, data in frames if "choices" in data]
    assert "".join(texts) == ("abab" if prompt == "ab" else "a")


def test_a_whole_body_in_http_1_0_has_its_length(echo: Running) -> None:
    with connected(echo, b"GET /health HTTP/1.0\r\n\r\n") as connection:
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["status"] == "ok"
