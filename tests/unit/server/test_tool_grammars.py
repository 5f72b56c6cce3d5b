"""Calls of tools that are certainly valid: a model of random weights, which can only be made to call by a grammar."""

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest

from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.grammar.answer_graph import CallMode, CallSpelling
from shared.grammar.calls import CallDescription, CalledFunction
from shared.grammar.grammar import Grammar
from shared.server.answers.served_chat import ChatPrompt, ServedChat
from shared.server.answers.tool_answer import ToolReading, whole_message
from shared.server.answers.tool_grammar import thought_marks, tool_grammar, tool_reading
from shared.server.bodies.protocol import ChatRequest
from shared.server.settings import ServerConfig
from shared.text.thoughts import MARKS, OPENED, Marks
from shared.text.tokenizer import Tokenizer
from shared.text.tool_format import TOOL_FORMATS
from tests.unit.server.echo import Running, serving
from tests.unit.server.exchange import assert_refused, chat, thinking_first

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["place"],
    "additionalProperties": False,
}
REPEATED = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"^(x|y)\1$"}}}


def tool(name: str, schema: Any = SCHEMA, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [tool("weather"), tool("time", {"type": "object", "additionalProperties": False}), NOW]
CALL_MARKS = ("</tool_call>", "<tool_call>")
SCHEMAS = {"weather": SCHEMA, "time": {"maxProperties": 0}, "now": {"maxProperties": 0}}


def with_special_tokens(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint whose last tokens are special ones that open and close calls."""
    shutil.copytree(folder, target)
    path = target / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    for text in CALL_MARKS:
        last = max(vocabulary, key=vocabulary.__getitem__)
        content["model"]["merges"] = [
            pair for pair in content["model"]["merges"] if "".join(pair).replace(" ", "") != last
        ]
        content["added_tokens"].append({**content["added_tokens"][0], "id": vocabulary.pop(last), "content": text})
    path.write_text(json.dumps(content))
    return target


@pytest.fixture(scope="module")
def servers(
    tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Running]]:
    special = with_special_tokens(tiny_checkpoints["qwen3"], tmp_path_factory.mktemp("special") / "model")
    thinking = thinking_first(tiny_checkpoints["qwen3"], tmp_path_factory.mktemp("thinking") / "model")
    folders = {**tiny_checkpoints, "special": special, "thinking": thinking}
    with contextlib.ExitStack() as stack:
        running = {}
        for name in ("llama", "qwen3", "special", "thinking"):
            engine: Any = Engine(EngineConfig(model=str(folders[name]), max_seq_len=2048))
            engine.may_step = threading.Event()  # which `serving` sets at its end
            template = "checkpoint" if name == "thinking" else None
            running[name] = stack.enter_context(serving(engine, chat_template=template))
        yield running


def ask(running: Running, **fields: Any) -> Any:
    settings = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 500}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    return running.openai().chat.completions.create(**(settings | {"extra_body": extra} | fields))


def ask_each(running: Running, seeds: range, **fields: Any) -> list[Any]:
    """The choice of each seed, from requests that share their steps."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: ask(running, seed=seed, **fields).choices[0], seeds))


EVEN = {"temperature": 100.0}
"""All tokens that are allowed are about as likely."""


def check(choice: Any) -> list[str]:
    """The names of the calls, all of which are valid."""
    for call in choice.message.tool_calls or []:
        assert jsonschema_rs.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    return [call.function.name for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("family", ["llama", "qwen3", "special"])
def test_a_call_that_must_be_made_is_valid(family: str, servers: dict[str, Running]) -> None:
    names, counts = set(), set()
    for choice in ask_each(servers[family], range(10), tool_choice="required", **EVEN):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        found = check(choice)
        names |= set(found)
        counts.add(len(found))
    assert len(names) > 1
    assert min(counts) == 1
    assert (max(counts) > 1) == (family != "llama"), "Llama 3 has one call a turn"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_one_function_that_is_named_and_one_call_that_is_asked_for(family: str, servers: dict[str, Running]) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ask_each(servers[family], range(4), tool_choice=named):
        assert check(choice) == ["weather"]
    for choice in ask_each(servers[family], range(4), tool_choice="required", parallel_tool_calls=False):
        assert len(check(choice)) == 1
    parts = list(ask(servers[family], tool_choice=named, seed=1, stream=True))
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "weather"
    assert jsonschema_rs.is_valid(SCHEMA, json.loads("".join(call.function.arguments for call in calls)))
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_free_text_until_a_call_begins(servers: dict[str, Running]) -> None:
    """A model that writes text for a while, then the token that opens a call."""
    running, num_words, num_calls = servers["special"], 0, 0
    opening = running.engine.tokenizer.token_id("<tool_call>")
    assert opening in running.engine.tokenizer.special_ids
    for choice in ask_each(running, range(6), temperature=30.0, logit_bias={str(opening): 100}):
        assert choice.finish_reason == ("tool_calls" if check(choice) else "stop")
        num_calls += len(choice.message.tool_calls or [])
        assert "tool_call" not in (choice.message.content or "")
        num_words += len(choice.message.content or "")
    assert num_words > 0
    assert num_calls > 0
    none = ask(running, seed=0, tool_choice="none", logit_bias={str(opening): 100}, max_tokens=50).choices[0]
    assert (none.finish_reason, none.message.tool_calls) == ("length", None)


@pytest.mark.parametrize("is_token", [True, False])
def test_a_special_token_opens_a_call_and_its_name_written_out_does_not(
    is_token: bool, servers: dict[str, Running]
) -> None:
    """The grammar has text there, in which any function may have any arguments."""
    tokenizer = servers["special"].engine.tokenizer
    reading = ToolReading.of(tokenizer, TOOL_FORMATS["qwen3"], TOOLS, has_several=True, is_spelled=True)
    written = '\n{"name": "weather", "arguments": {}}\n'
    marks = [(tokenizer.token_id(mark), "") if is_token else (0, mark) for mark in reversed(CALL_MARKS)]
    parts = [marks[0], (0, written), marks[1]]
    message = whole_message(reading, [StepOutput("a", token_id, text) for token_id, text in parts])
    assert message.get("content") == (None if is_token else f"<tool_call>{written}</tool_call>")
    assert len(message.get("tool_calls", [])) == int(is_token)


def test_a_call_behind_thinking(servers: dict[str, Running]) -> None:
    running, ends = servers["qwen3"], set()
    likely = {"logit_bias": {str(running.engine.tokenizer.token_id("</think>")): 100}, "temperature": 30.0}
    for choice in ask_each(running, range(8), tool_choice="required", **likely, extra_body={}):
        thought = choice.message.content
        ends.add((choice.finish_reason, thought is None))
        assert thought is None or thought.startswith("<think>")
        if choice.finish_reason == "tool_calls":
            assert thought is None or thought.endswith("</think>")
            check(choice)
    assert ends >= {("tool_calls", True), ("tool_calls", False)}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": [tool("a", REPEATED, strict=True)]}, "tools", "The arguments of a: "),
        ({"tools": [tool("a", REPEATED)], "tool_choice": "required"}, "tools", "#/properties/a/pattern"),
        ({"tools": [tool("a", {"type": "array"})], "tool_choice": "required"}, "tools", "must be of an object"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos", "ignore_eos is True"),
        (
            {"tools": TOOLS, "response_format": {"type": "regex", "pattern": "<[a-z]+>"}},
            "response_format.pattern",
            "can begin as what may stand before it does",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    fields: dict[str, Any], param: str, told: str, servers: dict[str, Running]
) -> None:
    with servers["qwen3"].client() as client:
        assert_refused(client.post("/v1/chat/completions", json=chat(**fields)), param, told)
        lax = chat(tools=[tool("a", REPEATED)])
        assert client.post("/v1/chat/completions", json=lax).is_success, "only what is strict must be followed"


def test_a_call_or_an_answer_in_a_format(servers: dict[str, Running]) -> None:
    formatted, ends = {"type": "json_schema", "schema": SCHEMA}, set()
    extra = {"response_format": formatted, "chat_template_kwargs": {"enable_thinking": False}}
    for choice in ask_each(servers["special"], range(12), **EVEN, extra_body=extra):
        ends.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert check(choice)
            assert choice.message.content is None
        elif choice.finish_reason == "stop":
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(choice.message.content))
    assert ends >= {"tool_calls", "stop"}
    required = ask(servers["qwen3"], tool_choice="required", seed=1, extra_body=extra).choices[0]
    assert check(required)
    with servers["llama"].client() as client:
        response = client.post("/v1/chat/completions", json=chat(tools=TOOLS, response_format={"type": "json_object"}))
        assert response.status_code == 422, "a call of Llama 3 is a JSON object too"


def test_a_format_behind_thinking(servers: dict[str, Running]) -> None:
    running = servers["qwen3"]
    likely = {"logit_bias": {str(running.engine.tokenizer.token_id("</think>")): 100}, "temperature": 30.0}
    formatted, thoughts = {"type": "json_schema", "schema": SCHEMA}, set()
    for thinking in (True, None):
        extra = {"response_format": formatted, "chat_template_kwargs": {"enable_thinking": thinking}}
        for choice in ask_each(running, range(8), tools=[], **likely, extra_body=extra):
            if choice.finish_reason == "stop":
                thought, mark, text = choice.message.content.rpartition("</think>")
                assert not mark or thought.startswith("<think>")
                assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))
                thoughts.add((thinking, bool(mark)))
    assert thoughts >= {(True, True), (True, False), (None, False)}
    assert (None, True) not in thoughts, "a program that did not ask for thoughts gets none"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["call", "format", "call or format"])
@pytest.mark.parametrize("thinking", [None, False])
def test_a_grammar_covers_what_follows_thoughts_that_the_prompt_has_opened(
    is_streamed: bool, kind: str, thinking: bool | None, servers: dict[str, Running]
) -> None:
    running = servers["thinking"]
    fields: dict[str, Any] = {"temperature": 30.0, "stream": is_streamed, "max_tokens": 800}
    fields["logit_bias"] = {str(running.engine.tokenizer.token_id("</think>")): 100}
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
    if kind == "call":
        fields["tool_choice"] = "required"
    else:
        extra |= {"response_format": {"type": "json_schema", "schema": SCHEMA}}
        fields["tools"] = TOOLS if kind == "call or format" else []

    def deltas_of(seed: int) -> list[Any]:
        answer = ask(running, seed=seed, extra_body=extra, **fields)
        return [chunk.choices[0].delta for chunk in answer] if is_streamed else [answer.choices[0].message]

    thoughts = set()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(deltas_of, range(4)))  # requests that share their steps
    for deltas in answers:
        thought, mark, text = "".join(delta.content or "" for delta in deltas).partition("</think>")
        called = "".join(call.function.arguments for delta in deltas for call in delta.tool_calls or [])
        if not mark:
            continue  # its length has ended it
        assert not thought.startswith("<think>")
        assert bool(called) != bool(text.strip())
        assert not text.strip() or jsonschema_rs.is_valid(SCHEMA, json.loads(text))
        assert kind != "call" or called
        assert kind != "format" or text
        thoughts.add(thought)
    assert thoughts
    assert max(map(len, thoughts)) > 0


@pytest.mark.parametrize(
    ("family", "fields", "strict", "separator", "is_first"),
    [
        ("qwen3", {}, "a", "\n", False),
        ("qwen3", {"parallel_tool_calls": False}, "a", None, False),
        ("qwen3", {"response_format": {"type": "json_object"}}, "a", "\n", True),
        ("qwen3", {"tool_choice": "required"}, "abc", "\n", True),
        ("qwen3", {"tool_choice": {"type": "function", "function": {"name": "b"}}}, "b", None, True),
        ("llama3", {"tool_choice": "required"}, "abc", None, True),
    ],
)
def test_what_a_request_asks_of_its_calls(
    family: str, fields: dict[str, Any], strict: str, separator: str | None, is_first: bool
) -> None:
    """The grammar and the reading of the answer are made of the same facts; some of their marks are special tokens."""
    marks = {"<|python_tag|>": 0, "<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4}
    tokenizer: Any = SimpleNamespace(token_id=marks.get, special_ids={0, 1, 3})
    form, has_trigger = TOOL_FORMATS[family], family == "qwen3"
    tools = [tool("a", strict=True), tool("b", {}), tool("c", None)]
    body = ChatRequest.model_validate(chat(tools=tools, **fields))
    has_format, choice = "response_format" in fields, fields.get("tool_choice")
    grammar = tool_grammar(body, tokenizer, form, MARKS, Grammar.json_object(), is_closed=True)
    trigger, closing = ("\uffff<tool_call>", "}\n</tool_call>") if has_trigger else ("", "}")
    hidden = None if has_trigger else "\uffff<|python_tag|>"
    thought = "\uffff<think>", "</think>"
    schemas = {"a": SCHEMA, "b": {}, "c": {"type": "object", "properties": {}, "additionalProperties": False}}
    called = strict if isinstance(choice, dict) else "abc"
    assert CallDescription.of_text(grammar.text) == CallDescription(
        CallMode.AUTO if choice is None else CallMode.REQUIRED,
        CallSpelling(trigger, form.head, form.middle, closing, separator, hidden, thought),
        tuple(CalledFunction(name, schemas[name], is_strict=name in strict) for name in called),
        ("json_object", "") if choice is None else None,  # where there must be a call, nothing else is an answer
        is_closed=True,
    )
    opening = "\udfff<tool_call>" if has_trigger else ""
    assert tool_reading(body, tokenizer, form, MARKS, has_grammar=True, has_format=has_format) == ToolReading(
        replace(form, opening=opening, thought=("\udfff<think>", "</think>")),
        ["a", "b", "c"],
        ({1: opening} if has_trigger else {}) | {3: "\udfff<think>"},
        has_several="parallel_tool_calls" not in fields,
        is_spelled=True,
        is_first=is_first,
    )
    for has_grammar in (False, True):
        begun = thought_marks(body, MARKS, is_thinking=False, has_grammar=has_grammar, has_format=has_format)
        assert begun == (None if has_grammar and has_format else MARKS)


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize(
    ("thinking", "is_thinking", "thought"),
    [(None, False, None), (True, False, MARKS), (None, True, OPENED), (False, True, OPENED)],
)
def test_a_format_begins_where_thoughts_end_of_a_model_without_tools_too(
    thinking: bool | None, is_thinking: bool, thought: Marks | None, has_tools: bool, tiny_checkpoints: dict[str, Path]
) -> None:
    handle: Any = SimpleNamespace(
        tokenizer=Tokenizer.load(tiny_checkpoints["qwen3"]),
        facts=SimpleNamespace(has_grammars=True, model_config=SimpleNamespace(family="qwen3")),
    )
    served = ServedChat(handle, ServerConfig(model_name="echo"))
    if not has_tools:
        served.tool_format = None
    fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": thinking}}
    fields |= {"tools": TOOLS, "tool_choice": "none"} if has_tools else {}
    found = served.grammar(ChatRequest.model_validate(chat(**fields)), ChatPrompt([1], is_thinking))
    assert found is not None
    grammar, param = found
    assert param == "response_format"
    if thought is None:
        assert grammar == Grammar.json_object()
    else:
        assert CallDescription.of_text(grammar.text).spelling.thought == thought


def test_a_format_of_the_answer_and_no_calls(servers: dict[str, Running]) -> None:
    formatted = {"type": "json_schema", "schema": SCHEMA}
    choice = ask(servers["qwen3"], tool_choice="none", extra_body={"response_format": formatted}).choices[0]
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(choice.message.content))
