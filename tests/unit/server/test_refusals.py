"""Which values, prompts, bodies and keys are taken, and with which error the others are refused."""

import itertools
import json
import re
import select
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import QueueFullError, RequestError, UnknownSegmentError
from shared.server import errors
from shared.tracks.segments.inquiry import SegmentInfo
from tests.unit.server.echo import ENDLESS, LIMIT, VOCAB, EchoEngine, connected, endless, everything, serving
from tests.unit.server.exchange import assert_refused, chat, completion, error_of, events
from tests.waiting import wait_until

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
AS_TEXT = "it must be a text or a list of parts of type text."
AS_PROMPT = "it must be a text or a list of token ids, or a list of prompts."
EMPTY = "is empty; give at least one character of text or one token id."


def said(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return chat() | {"messages": [{"role": role, "content": content, **more}]}


OPENED = {"continue_final_message": True, "add_generation_prompt": False}
LENGTHS = f"this server allows at most {LIMIT} tokens for prompt and answer together."
INVALID: list[tuple[dict[str, Any], str, str]] = [
    (completion(n=0), "n", "n is 0; input should be greater than or equal to 1."),
    (completion(n="x" * 99), "n", f"n is '{'x' * 59}...; input should be a valid integer."),
    (completion(max_tokens=0), "max_tokens", "max_tokens is 0; it must be at least 1, or 0 together with echo."),
    *((body(**{"max_tokens": 1, name: LIMIT + 1}), name, f"{name} is {LIMIT + 1}; {LENGTHS}")
      for body, name in ((completion, "max_tokens"), (chat, "max_tokens"), (chat, "max_completion_tokens"))),
    (completion(best_of=2), "best_of",
     "best_of is 2 and n is 1; every answer is returned, so best_of must equal n."),
    (completion(stop=["a"] * 17), "stop", "stop holds 17 strings; it may hold at most 16."),
    (completion(stop="x" * 257), "stop", "stop holds a string of more than 256 characters; shorten it."),
    (completion(logit_bias=[5]), "logit_bias", "logit_bias is [5]; it must be an object of token ids and numbers."),
    *((completion(logit_bias={key: 1}), "logit_bias",
       f'logit_bias has the key {key!r}; a key must be a token id, such as "11".')
      for key in ("x", "05", "-1", "9" * 11)),
    *((completion(empty), "prompt", f"prompt {EMPTY}") for empty in ("", [], [""], [[]], ["a", ""], [[1], []])),
    *((completion(prompt), "prompt", f"prompt is {prompt!r}; {AS_PROMPT}")
      for prompt in ({}, 7, [1.5], [True], [1, "a"], None)),
    (completion(["a"] * 65), "prompt", "prompt holds 65 prompts; it may hold at most 64."),
    (completion(["a", [1]]), "prompt", "prompt holds texts and lists of token ids; send them in two requests."),
    *((completion(prompt), "prompt",
       f"The prompt holds the token id {index}; this model's ids are integers from 0 to {VOCAB - 1}.")
      for prompt, index in (([VOCAB], VOCAB), ([[1], [-1]], -1), ([[1], [1, VOCAB]], VOCAB))),
    (chat(top_logprobs=2), "top_logprobs", "top_logprobs is 2 and logprobs is not true; set logprobs to true too."),
    (chat(chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs.enable_thinking",
     "enable_thinking is true; this model's chat format does not read it: leave it out or set it to false."),
    (chat(continue_final_message=True), "add_generation_prompt",
     "continue_final_message is true and add_generation_prompt is not false; set that to false."),
    *((body | OPENED, "continue_final_message",
       "continue_final_message is true; the last message must be the assistant's, without tool_calls.")
      for body in (chat(), said("assistant", tool_calls=[CALL]))),
    (chat(prediction={"type": "content", "content": "x " * LIMIT}), "prediction.content",
     f"prediction.content has at least {2 * LIMIT} tokens; it may have at most {LIMIT - 1}, since no answer of this "
     "server is longer: shorten it."),
    (chat(segments=["a"], chunks=["b"]), "chunks",
     "chunks is the former name of segments, and both are given; leave chunks out."),
    *((chat(segments=[one]), "segments",
       f"segments holds {shown}; give the id of a segment, or an object with content.")
      for one, shown in ((5, "5"), ("", "''"), ("x" * 81, f"'{'x' * 59}..."))),
    (chat(segments=[{"content": ""}]), "segments", f"segments holds {{'content': ''}}; content {EMPTY}"),
    (chat(segments=[{"content": "a", "role": ""}]), "segments",
     "segments holds {'content': 'a', 'role': ''}; role: string should have at least 1 character."),
    (chat(segments=5), "segments", "segments is 5; it must be a list of ids and of objects with content."),
    (said("robot"), "messages.0.role", "role is 'robot'; the roles are system, user, assistant and tool."),
    (said("user", 5), "messages.0.content", f"content is 5; {AS_TEXT}"),
    (said("user", None), "messages.0", f"content is None; {AS_TEXT}"),
    (said("user", [{"type": "text"}]), "messages.0.content",
     'content holds the part {\'type\': \'text\'}; a part must be {"type": "text", "text": "..."}.'),
    (said("user", tool_calls=[CALL]), "messages.0",
     "tool_calls is given with the role user; only an assistant calls tools."),
    *((said(role, tool_call_id=one), "messages.0",
       f"tool_call_id is {one!r} with the role {role}; the role tool needs it, and no other has it.")
      for role, one in (("user", "c"), ("assistant", "c"), ("tool", None))),
    (chat() | {"messages": []}, "messages",
     "messages is []; list should have at least 1 item after validation, not 0."),
    (chat() | {"messages": "x"}, "messages", "messages is 'x'; input should be a valid list."),
]  # fmt: skip
UNSUPPORTED: list[tuple[dict[str, Any], str, str]] = [
    *((completion(**{name: value}), name, f"{name} is {value!r}; this server accepts only {allowed}; or leave it out.")
      for name, value, allowed in (("suffix", "x", '"" or null'), ("use_beam_search", 0, "false or null"),
                                   ("length_penalty", True, "1 or null"))),
    (completion(thinking_budget=5), "thinking_budget",
     "thinking_budget is 5; leave it out: phase 11.1 limits thinking, of models whose tokenizer has </think>."),
    (completion(guided_regex="a"), "guided_regex",
     "guided_regex asks for a grammar, and phase 12 is the first whose engine has them: leave it out."),
    *((said("user", [{"type": "text", "text": "x"}, {"type": kind}]), "messages.0.content",
       f"content holds a part of the type '{kind}'; this server reads text alone, in parts of the type text.")
      for kind in ("image_url", "input_audio", "file")),
    *((said(role, **{name: value}), f"messages.0.{name}",
       f"{name} is {value!r}; this server accepts only {allowed}; or leave it out.")
      for role, name, value, allowed in (("user", "images", ["x"], "[] or null"),
                                         ("assistant", "audio", {"id": "x"}, "null"),
                                         ("assistant", "function_call", {"name": "f"}, "null"))),
]  # fmt: skip
REFUSALS: list[tuple[int, str, dict[str, Any], str, str]] = [
    *((422, "invalid_value", *row) for row in INVALID),
    *((422, "unsupported", *row) for row in UNSUPPORTED),
    (422, "model_not_found", completion(model="x" * 99), "model",
     f"model is '{'x' * 80}'; this server serves 'echo'."),
    (422, "unknown_field", completion(odd=1), "odd",
     "The field odd is unknown; leave it out. docs/API.md lists the fields."),
    (400, "missing_field", said("user") | {"messages": [{"role": "user"}], "n": 0}, "messages.0.content",
     "The field messages.0.content is missing."),
]  # fmt: skip


def test_every_refusal_has_its_status_code_field_and_sentence(client: httpx.Client) -> None:
    for status, code, body, param, told in REFUSALS:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        response = client.post(path, json=body)
        error = {"message": told, "type": "invalid_request_error", "param": param, "code": code}
        assert (response.status_code, response.json()) == (status, {"error": error})


@pytest.mark.parametrize(("length", "told"), [(LIMIT, ""), (1_900_000, "at least ")], ids=["counted", "not"])
def test_a_prompt_that_is_too_long_is_refused(length: int, told: str, client: httpx.Client) -> None:
    """A text that fits into no sequence whatever its tokens are is not tokenized."""
    bodies = {"prompt": ("/v1/completions", completion), "messages": ("/v1/chat/completions", chat)}
    for param, (path, body) in bodies.items():
        response = client.post(path, json=body("x" * length))
        assert_refused(response, param, f"maximum context length is {LIMIT} tokens. However, you requested {told}")
        assert error_of(response)["code"] == "context_length_exceeded", path


def test_openais_statuses_if_they_are_asked_for(folder: Path) -> None:
    engine = EchoEngine(folder)
    with serving(engine, openai_statuses=True) as running, running.client() as client:
        for body, status, code in (
            (completion(n=0), 400, "invalid_value"),
            (completion(unheard_of=1), 400, "unknown_field"),
            (completion("x" * LIMIT), 400, "context_length_exceeded"),
            (completion("x" * LIMIT, stream=True), 400, "context_length_exceeded"),
            (completion(model="other"), 404, "model_not_found"),
            (completion("a", guided_regex="a"), 400, "unsupported"),
            (completion("\ud800"), 400, "invalid_value"),
        ):
            headers = {"content-type": "application/json"}
            response = client.post("/v1/completions", content=json.dumps(body).encode(), headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (status, code), body
        described = client.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]["responses"]
        assert "422" not in described

        def refuse(*_: object) -> str:
            raise RequestError("This id is in use.")

        engine.add_request = refuse  # type: ignore[method-assign]
        for stream in (True, False):  # refused by the engine, before the headers
            assert client.post("/v1/completions", json=completion(stream=stream)).status_code == 400, stream


def test_every_code_is_described() -> None:
    sources = "".join(path.read_text() for path in Path(errors.__file__).parent.rglob("*.py"))
    codes = set(re.findall(r'ApiError\(\s*\d+, "(\w+)"|code="(\w+)"', sources))
    described = (Path(errors.__file__).parents[2] / "docs/API.md").read_text()
    assert [code for found in codes for code in found if code and f"`{code}`" not in described] == []


def test_what_is_known_beforehand_is_refused_while_a_step_runs(folder: Path) -> None:
    engine = EchoEngine(folder, max_batch_size=1, max_waiting_requests=1)
    engine.pool.request_capacity = 30
    with serving(engine) as running, running.client() as client:
        with running.client() as first, ThreadPoolExecutor(1) as aside, engine.held():
            answer = aside.submit(first.post, "/v1/completions", json=completion([65, 66], max_tokens=1))
            wait_until(lambda: engine.is_held)
            refused = [
                client.post("/v1/completions", json=completion(prompt, max_tokens=tokens))
                for prompt, tokens in (([65] * 10, 21), ([VOCAB], 1), ([65] * LIMIT, 1), ([65], 1))
            ]
        assert answer.result().status_code == 200
        assert [response.status_code for response in refused] == [422, 422, 422, 503]
        assert [error_of(response)["message"].partition(";")[0] for response in refused] == [
            "This model's maximum context length is 30 tokens. However, you requested 31 tokens (10 in the prompt, 21 "
            "in the output), and the KV cache holds 30 for one request: shorten the prompt, or lower max_new_tokens.",
            f"The prompt holds the token id {VOCAB}",
            f"This model's maximum context length is {LIMIT} tokens. However, you requested {LIMIT} tokens, and the "
            f"output needs at least one more: shorten the prompt to at most {LIMIT - 1}, or raise max_seq_len up to "
            "the model's limit.",
            "1 requests wait and max_waiting_requests is 1",
        ]
        assert {error_of(response)["param"] for response in refused[:3]} == {"prompt"}
        codes = [error_of(response)["code"] for response in refused]
        assert codes == ["context_length_exceeded", "invalid_value", "context_length_exceeded", "queue_full"]


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFullError("There is no place any more."), 503, "queue_full"),
        (RequestError("This id is in use."), 422, "invalid_value"),
        (ZeroDivisionError("a bug"), 500, "engine_error"),
    ],
)
def test_what_the_engine_refuses_itself_is_a_status_too(
    refusal: Exception, status: int, code: str, folder: Path
) -> None:
    """Such as the queue's last place, which a preempted request may take before a new one comes to it."""
    engine = EchoEngine(folder)

    def refuse(*_: object) -> str:
        raise refusal

    with serving(engine, retry_after=3) as running, running.client() as client:
        take, engine.add_request = engine.add_request, refuse  # type: ignore[method-assign]
        for path, body, param in (
            ("/v1/completions", completion(), "prompt"),
            ("/v1/chat/completions", chat(), "messages"),
            ("/v1/chat/completions", chat(stream=True), "messages"),
        ):
            response = client.post(path, json=body)
            assert response.status_code == status
            assert (error_of(response)["code"], response.headers.get("retry-after")) == (
                code,
                "3" if status == 503 else None,
            )
            assert error_of(response)["param"] == (param if status == 422 else None)
            assert (error_of(response)["type"] == "overloaded_error") == (status == 503)
        engine.add_request = take  # type: ignore[method-assign]
        assert client.post("/v1/completions", json=completion()).status_code == 200
        health = client.get("/health").json()
        assert (health["num_requests_running"], health["num_requests_waiting"]) == (0, 0)
        assert client.get("/debug/engine").json()["num_open_requests"] == 0


def test_a_refusal_behind_a_comment_is_an_event(folder: Path) -> None:
    engine = endless(folder, max_batch_size=1)
    with serving(engine, keep_alive=0.05) as running, running.client() as client, running.client() as other:
        with client.stream("POST", "/v1/completions", json=completion(**ENDLESS)):
            wait_until(lambda: bool(engine.running))

            def refuse(*_: object) -> str:
                raise QueueFullError("There is no place any more.")

            engine.add_request = refuse  # type: ignore[method-assign]
            with engine.held():
                response = other.send(other.build_request("POST", "/v1/completions", json=completion()), stream=True)
            response.read()
        assert response.status_code == 200
        assert response.text.startswith(": keep-alive\n\n")
        ((name, data),) = events(response.text)
        assert (name, data["error"]["code"]) == ("error", "queue_full")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"model": "echo"}', "missing_field"),
        (b'{"prompt": "a"}', "missing_field"),
        (b'{"model": "echo", "n": 0}', "missing_field"),
        (b'{"model": "echo", "prompt": "\xff"}', "invalid_request"),
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
        assert_refused(response, "temperature")


def test_the_frameworks_own_errors_have_the_same_shape(client: httpx.Client) -> None:
    assert error_of(client.get("/nowhere"))["code"] == "not_found"
    assert error_of(client.get("/page/nothing.js"))["code"] == "not_found"
    assert error_of(client.get("/v1/models/other"))["code"] == "model_not_found"
    refused = client.get("/v1/completions")
    assert refused.status_code == 405
    assert refused.headers["allow"] == "POST"
    assert error_of(refused)["code"] == "method_not_allowed"
    assert client.put("/v1/segments").headers["allow"] == "GET, POST"
    assert client.get("/docs").status_code == 404
    assert client.options("/v1/segments").headers["allow"] == "GET, POST", "of all routes with this path"
    assert client.options("/v1/segments/a").headers["allow"] == "DELETE, GET", "of all routes with this path"


def test_a_body_is_bounded_announced_or_not(folder: Path) -> None:
    with serving(EchoEngine(folder), max_body_bytes=5000) as running, running.client() as client:
        for length in (5000, 5001):
            body = json.dumps(completion()).encode().ljust(length)
            for content in (body, iter([body[:3000], body[3000:]])):
                response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
                assert response.status_code == (200 if length == 5000 else 413)
                if length == 5001:
                    assert error_of(response)["code"] == "body_too_large"
                    assert "5000" in error_of(response)["message"]


def test_a_body_that_does_not_come_is_given_up(folder: Path) -> None:
    with serving(EchoEngine(folder), body_timeout=0.3) as running:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for num_bytes in (0, 200):  # of a body that drips
            with connected(running, head + b"Content-Length: 5000\r\n\r\n{") as connection:
                num_sent = 0
                while num_sent < num_bytes and not select.select([connection], [], [], 0.02)[0]:
                    num_sent += 1
                    connection.sendall(b" ")
                answer = everything(connection)
            assert num_sent < 200, "it has no more time"
            assert answer.startswith(b"HTTP/1.1 408")
            assert b'"code":"body_timeout"' in answer


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


def test_an_engine_without_segments_says_which_phase_has_them(client: httpx.Client) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
    for response, code, param in (
        (client.post("/v1/segments", json={"model": "echo", "content": "a"}), "no_segments", "content"),
        (client.get("/v1/segments"), "no_segments", None),
        (client.post("/v1/chat/completions", json={**chat, "segments": ["a"]}), "no_segments", "segments"),
        (client.get("/v1/chunks"), "no_chunks", None),  # the former name
        (client.post("/v1/chat/completions", json={**chat, "chunks": ["a"]}), "no_chunks", "chunks"),
        *((client.get("/v1/segments", params={"limit": limit}), "no_segments", None) for limit in (1, 1000)),
    ):
        assert response.status_code == 422
        error = error_of(response)
        assert (error["code"], error["param"]) == (code, param)
        assert error["message"] == (
            "This server's engine has no segments; serve phase 9.1 for them: infer serve --phase 09.1."
        )


def test_a_page_of_segments_has_one_to_a_thousand(client: httpx.Client) -> None:
    for path, limit in itertools.product(("/v1/segments", "/v1/chunks"), (0, 1001)):
        assert_refused(client.get(path, params={"limit": limit}), "limit", "than or equal to 1")


@pytest.mark.parametrize(("field", "code"), [("segments", "segment_not_found"), ("chunks", "chunk_not_found")])
def test_a_segment_that_is_deleted_before_its_chat_begins_is_missed_by_its_field(
    field: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def context(*_: object) -> list[SegmentInfo]:
        return [SegmentInfo("s", "user", 3, 0, 0)]

    def refuse(*_: object, segment_ids: tuple[str, ...]) -> str:
        raise UnknownSegmentError(f"There is no segment {segment_ids[0]}.")

    monkeypatch.setattr("shared.server.routes.chat.chat_context", context)
    engine: Any = EchoEngine(folder)
    engine.add_request = refuse
    with serving(engine) as running, running.client() as client:
        response = client.post("/v1/chat/completions", json=chat(**{field: ["s"]}))
    assert_refused(response, field, "There is no segment s.", 404)
    assert error_of(response)["code"] == code
