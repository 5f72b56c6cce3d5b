"""Answers with a grammar over HTTP: every way to ask for one, and what is refused."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.grammar import grammar
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.server.bodies.protocol import CompletionRequest
from shared.server.bodies.structured_output import described_grammar
from shared.server.engine.grammar_process import GrammarProcess
from tests.unit.server.echo import EchoEngine, serving
from tests.unit.server.exchange import assert_refused, chat, completion, events

DATE = "[0-9]{4}-[0-9]{2}"
CHOICE = ["yes", "no", "maybe"]
ROUTES = {"/v1/completions": completion, "/v1/chat/completions": chat}
HOSTILE = "(a|b)*a(a|b){17}"


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    engine: Any = Engine(EngineConfig(model=str(folder), max_seq_len=512))
    engine.may_step = threading.Event()  # which `serving` sets at its end
    with serving(engine) as running, running.client() as client:
        client.headers["accept"] = "application/json"  # not the named events
        yield client


def text_of(body: dict[str, Any]) -> str:
    (choice,) = body["choices"]
    found: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "regex", "pattern": DATE}}, DATE),
        ({"structured_outputs": {"regex": DATE}}, DATE),
        ({"guided_regex": DATE}, DATE),
        ({"structured_outputs": {"choice": CHOICE}}, "|".join(CHOICE)),
        ({"guided_choice": CHOICE}, "|".join(CHOICE)),
        ({"structured_outputs": {"choice": CHOICE, "regex": None, "json": None}}, "|".join(CHOICE)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_way_to_ask(path: str, fields: dict[str, Any], pattern: str, client: httpx.Client) -> None:
    for seed in range(3):
        body = ROUTES[path]("Say", **fields, seed=seed) | {"max_tokens": 20}
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert re.fullmatch(pattern, text_of(response.json()))
        assert response.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_says_where_each_token_was_drawn_if_that_is_asked_for(path: str, client: httpx.Client) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 3}
    body = ROUTES[path]("Say", guided_json=schema, n=2, seed=4, stream=True) | {"max_tokens": 60}
    plain, watched = (
        [data for _, data in events(client.post(path, json=body | more).text) if data != "[DONE]"]
        for more in ({}, {"grammar_progress": True})
    )
    assert not any("grammar" in frame for frame in plain)
    texts = ["", ""]
    for frame in watched:
        (choice,) = frame["choices"]
        if "grammar" not in frame:
            assert choice["finish_reason"] or choice["delta"].get("role")
            continue
        before, stack = texts[choice["index"]], frame["grammar"]["stack"]
        assert set(frame["grammar"]) == {"state", "stack", "num_allowed"}
        assert frame["grammar"]["num_allowed"] >= 1
        inside = before[:1] if not before.endswith("]") else ""
        assert stack == inside + '"' * (before.count('"') % 2)
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"]["content"]
    assert all(len(json.loads(text)) in (2, 3) for text in texts)


def test_named_events_say_it_too_and_free_answers_never(client: httpx.Client) -> None:
    named = {"accept": "text/event-stream"}
    body = completion("Say", guided_regex=DATE, grammar_progress=True) | {"max_tokens": 20}
    frames = [data for name, data in events(client.post("/v1/completions", json=body, headers=named).text)]
    assert [frame["grammar"]["stack"] for frame in frames[:-1]] == [""] * (len(frames) - 1)
    assert frames[0]["grammar"]["num_allowed"] == 10, "the digits of a vocabulary of bytes"
    free = completion("Say", grammar_progress=True) | {"max_tokens": 3}
    frames = [data for name, data in events(client.post("/v1/completions", json=free, headers=named).text)]
    assert not any("grammar" in frame for frame in frames)


def test_a_stream_a_beginning_and_no_format(client: httpx.Client) -> None:
    body = completion("Say", guided_regex=DATE, stream=True, seed=1) | {"max_tokens": 20}
    frames = [data for _, data in events(client.post("/v1/completions", json=body).text) if data != "[DONE]"]
    assert re.fullmatch(DATE, "".join(frame["choices"][0]["text"] for frame in frames))
    short = client.post("/v1/completions", json=completion("Say", guided_regex="a{9}", max_tokens=2)).json()
    assert short["choices"][0]["finish_reason"] == "length"
    assert set(text_of(short)) == {"a"}
    free = [
        completion("Say", seed=1),
        *(completion("Say", seed=1, response_format=f) for f in ({"type": "text"}, None)),
    ]
    assert len({text_of(client.post("/v1/completions", json=body).json()) for body in free}) == 1


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "response_format is 'json'; it must be an object whose type is"),
    ({"response_format": {"type": "xml"}}, "response_format", "response_format is {'type': 'xml'}"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern", "response_format.pattern is missing"),
    ({"response_format": {"type": "text", "a": 1}}, "response_format.a", "The field response_format.a is unknown"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema is missing",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": 5}},
        "response_format.schema",
        "response_format.schema is 5; it must be an object",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "strict": True}},
        "response_format.strict",
        "The field response_format.strict is unknown",
    ),
    ({"response_format": {"type": "regex", "pattern": "(a"}}, "response_format.pattern", "The pattern '(a' has an op"),
    ({"structured_outputs": {}}, "structured_outputs", "structured_outputs is {}; it must be an object with one of"),
    ({"structured_outputs": {"grammar": "a"}}, "structured_outputs", "structured_outputs is {'grammar': 'a'}"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "json_object is False; it must"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "json_object is 1; it must"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": 1}},
        "structured_outputs.disable_additional_properties",
        "disable_additional_properties is 1; it must be a boolean",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "The schema is not JSON"),
    ({"guided_json": {"properties": {"a": {"pattern": r"^(x|y)\1$"}}}}, "guided_json", "#/properties/a/pattern"),
    ({"guided_json": {"uniqueItems": {}}}, "guided_json", "#/uniqueItems"),
    ({"guided_regex": 5}, "guided_regex", "The pattern is 5; it must be a regular expression"),
    ({"guided_regex": "(?<=a)b"}, "guided_regex", "has a lookbehind, which is not supported, at position 0"),
    ({"guided_regex": HOSTILE}, "guided_regex", "more than"),
    ({"guided_choice": []}, "guided_choice", "a list of 1 to 10000 texts"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "a list of 1 to 10000 texts"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "guided_regex and guided_choice are given"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "ignore_eos is True; it must be False"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_no_grammar_is_refused_by_its_field(
    fields: dict[str, Any], param: str, message: str, client: httpx.Client
) -> None:
    for path, body in ROUTES.items():
        assert_refused(client.post(path, json=body(**fields)), param, message)


ASKED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.pattern"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize("path", ROUTES)
def test_a_phase_before_grammars_refuses_them_by_the_field(path: str, folder: Path) -> None:
    with serving(EchoEngine(folder)) as running, running.client() as client:
        for fields, param in ASKED:
            assert_refused(client.post(path, json=ROUTES[path](**fields)), param, "phase 12 is the first")
        assert client.post(path, json=ROUTES[path](response_format={"type": "text"})).status_code == 200
        assert running.engine.num_steps > 0


def test_a_slow_grammar_delays_no_other_request(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """While grammars are compiled, others are: requests without one, with a known one, and with a new one."""
    compile, begun, may_end = GrammarProcess.compile, threading.Semaphore(0), threading.Event()

    def held(self: GrammarProcess, asked: Grammar, *arguments: Any) -> Grammar:
        if not asked.text.startswith(HOSTILE):
            return compile(self, asked, *arguments)
        begun.release()
        may_end.wait(60)
        raise GrammarError("The grammar is too slow.")

    def refuse(*arguments: object) -> None:
        pytest.fail("a grammar is compiled in the process of the engine")

    monkeypatch.setattr(GrammarProcess, "compile", held)
    monkeypatch.setattr(grammar, "compile_grammar", refuse)
    with ThreadPoolExecutor(4) as aside:
        slow = [
            aside.submit(client.post, "/v1/completions", json=completion(guided_regex=HOSTILE + "a" * n))
            for n in range(4)
        ]
        for _ in slow:
            assert begun.acquire(timeout=60)
        for more in ({}, {"guided_regex": "[0-9]{3}"}, {"guided_regex": "[0-9]{3}"}, {"guided_choice": ["a", "b"]}):
            assert client.post("/v1/completions", json=completion(**more)).is_success
        assert not any(answer.done() for answer in slow)
        may_end.set()
    for answer in slow:
        assert_refused(answer.result(), "guided_regex", "The grammar is too slow.")


CLOSED = {"disable_additional_properties": True}


@pytest.mark.parametrize(
    ("fields", "default", "expected"),
    [
        ({"structured_outputs": {"json": {}}}, False, False),
        ({"structured_outputs": {"json": {}} | CLOSED}, False, True),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": None}}, True, True),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": False}}, True, False),
        ({"guided_json": {}}, True, True),
        ({"response_format": {"type": "json_schema", "schema": {}}}, True, True),
    ],
)
def test_objects_are_closed_if_the_body_or_the_server_says_so(
    fields: dict[str, Any], default: bool, expected: bool
) -> None:
    found = described_grammar(CompletionRequest(model="m", prompt="p", **fields), is_closed=default)
    assert found is not None
    assert found[0] == Grammar.json_schema({}, is_closed=expected)


def test_a_server_that_closes_objects(folder: Path) -> None:
    """A random model would invent keys."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    engine: Any = Engine(EngineConfig(model=str(folder), max_seq_len=512))
    engine.may_step = threading.Event()
    with serving(engine, close_objects=True) as running, running.client() as client:
        client.headers["accept"] = "application/json"
        for seed in range(3):
            body = completion("Say", guided_json=schema, seed=seed, max_tokens=100)
            assert json.loads(text_of(client.post("/v1/completions", json=body).json())) == {"a": None}
