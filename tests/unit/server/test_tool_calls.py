"""Calls of tools over HTTP: openai's client against an engine with scripted answers."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shared.engine.output import StepOutput
from shared.engine.request import Request, TokenLogprobs
from shared.sampling.params import SamplingParams
from shared.server.answers.conversation import conversation
from shared.server.answers.tool_answer import ToolReading, whole_message
from shared.server.bodies.protocol import ChatRequest
from shared.server.bodies.tool_fields import MAX_TOOLS
from shared.text.chat import ChatMessage, ToolCall
from shared.text.tool_format import TOOL_FORMATS
from tests.unit.server.echo import EchoEngine, Running, serving
from tests.unit.server.exchange import assert_refused, chat, thinking_first

FAMILIES = ("llama", "qwen3", "gemma3_text")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'
ZURICH = [("weather", '{"place": "Zürich"}')]
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"place": "Zürich"}}'


def tool(name: str, **more: Any) -> Any:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **more}}


USER: Any = {"role": "user", "content": "Hi"}
TOOLS = [tool("weather"), tool("time")]
NAMED = {"type": "function", "function": {"name": "time"}}
CALLED: Any = {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}


class ScriptedEngine(EchoEngine):
    """Answers every prompt with one text, and keeps the prompts and the requests' parameters."""

    limits_thinking = True

    def __init__(self, folder: Path, family: str) -> None:
        super().__init__(folder)
        self.model.config.family = family
        self.script = ""
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    def _next_token(self, request: Request) -> StepOutput:
        if not request.output_ids:
            self.prompts.append(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
            self.params.append(request.params)
        ids = [*self.tokenizer.encode(self.script, add_special_tokens=False), min(self.tokenizer.eos_ids)]
        token_id = ids[len(request.output_ids)]
        request.append(token_id)
        request.num_scheduled_tokens = request.num_tokens - 1
        logprobs = None if request.params.logprobs is None else TokenLogprobs(-0.5, ())
        return self.streams[request].push(token_id, logprobs)


@pytest.fixture(scope="module")
def servers(
    tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Running]]:
    folder = thinking_first(tiny_checkpoints["qwen3"], tmp_path_factory.mktemp("thinking") / "model")
    engines = {name: ScriptedEngine(tiny_checkpoints[name], name) for name in FAMILIES}
    with (
        serving(engines["llama"]) as llama,
        serving(engines["qwen3"]) as qwen,
        serving(engines["gemma3_text"]) as gemma,
        serving(ScriptedEngine(folder, "qwen3"), chat_template="checkpoint") as thinking,
    ):
        yield {"llama": llama, "qwen3": qwen, "gemma3_text": gemma, "thinking": thinking}


@pytest.fixture
def client(servers: dict[str, Running]) -> Iterator[httpx.Client]:
    with servers["qwen3"].client() as client:
        yield client


def ask(running: Running, script: str, **fields: Any) -> Any:
    running.engine.script = script  # type: ignore[attr-defined]
    settings = {"model": "echo", "messages": [USER], "tools": TOOLS, "max_tokens": 600}
    return running.openai().chat.completions.create(**(settings | fields))


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.parametrize(
    ("family", "script", "content", "calls"),
    [
        ("qwen3", f"I look.\n{CALL}\n{SECOND}", "I look.", [("weather", '{"place": "Zürich"}'), ("time", "{}")]),
        ("qwen3", CALL, None, [("weather", '{"place": "Zürich"}')]),
        ("qwen3", "No call < here.", "No call < here.", []),
        ("qwen3", f"<think>{SECOND}</think>\n\n{CALL}", f"<think>{SECOND}</think>", ZURICH),
        ("qwen3", CALL.replace("weather", "other"), CALL.replace("weather", "other"), []),
        ("llama", LLAMA_CALL, None, [("weather", '{"place": "Zürich"}')]),
        ("llama", '{"name": "Ada"}', '{"name": "Ada"}', []),
    ],
)  # fmt: skip
def test_an_answer_and_its_stream(
    family: str, script: str, content: str | None, calls: list[tuple[str, str]], servers: dict[str, Running]
) -> None:
    check_answer(servers[family], script, content, calls)


@pytest.mark.parametrize("family", ["thinking", "qwen3"])
def test_an_answer_whose_prompt_has_opened_the_thoughts(family: str, servers: dict[str, Running]) -> None:
    """By the template of the checkpoint, or by a message that goes on. Limits on thoughts hold for them, although the
    request asks for none."""
    without = {"min_thinking_tokens": 3, "chat_template_kwargs": {"enable_thinking": False}}
    running, fields = servers[family], {"extra_body": without}
    if family == "qwen3":
        fields = {
            "messages": [USER, {"role": "assistant", "content": "<think>\nHm, "}],
            "extra_body": without | {"continue_final_message": True, "add_generation_prompt": False},
        }
    thoughts = f"I may {SECOND}.\n</think>"
    check_answer(running, f"{thoughts}\n\n{CALL}", thoughts, ZURICH, **fields)
    check_answer(running, CALL, CALL, [], **fields)
    engine: Any = running.engine
    assert engine.prompts[-1].endswith("<think>\n" if family == "thinking" else "<think>\nHm, ")
    assert engine.params[-1].min_thinking_tokens == 3
    check_answer(servers["qwen3"], CALL, None, ZURICH, extra_body=without)
    engine = servers["qwen3"].engine
    assert engine.params[-1].min_thinking_tokens == 0


def test_each_choice_has_calls_of_its_own(servers: dict[str, Running]) -> None:
    calls: list[list[Any]] = [[], []]
    for chunk in ask(servers["qwen3"], f"{CALL}\n{SECOND}", stream=True, n=2):
        (choice,) = chunk.choices
        started = [call for call in choice.delta.tool_calls or [] if call.function.name is not None]
        calls[choice.index] += [(call.index, call.function.name) for call in started]
    assert calls == [[(0, "weather"), (1, "time")]] * 2


def check_answer(
    running: Running, script: str, content: str | None, calls: list[tuple[str, str]], **fields: Any
) -> None:
    """The answer with this script has this content and these calls, and so has its stream."""
    choice = ask(running, script, **fields).choices[0]
    assert (choice.message.content, calls_of(choice.message)) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert len({call.id for call in choice.message.tool_calls or []}) == len(calls)
    text, found = "", []
    for chunk in ask(running, script, stream=True, **fields):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.function.name is not None:
                assert call.index == len(found)
                assert call.id
                assert call.type == "function"
                found.append((call.function.name, ""))
            name, arguments = found[call.index]
            found[call.index] = name, arguments + call.function.arguments
    assert (text, found) == (content or "", calls)
    assert chunk.choices[0].finish_reason == choice.finish_reason


def test_openais_helper_of_streams(servers: dict[str, Running]) -> None:
    running = servers["qwen3"]
    running.engine.script = f"{CALL}\n{SECOND}"  # type: ignore[attr-defined]
    stream_of = running.openai().chat.completions.stream
    with stream_of(model="echo", messages=[USER], tools=TOOLS, max_tokens=600) as stream:
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == [("weather", '{"place": "Zürich"}'), ("time", "{}")]


@pytest.mark.parametrize(
    ("family", "written", "calls"),
    [
        ("qwen3", "<tool_ca", []),
        ("qwen3", CALL.partition("her")[0], []),
        ("qwen3", CALL.partition(",")[0], [("weather", "")]),
        ("qwen3", CALL.partition("ü")[0], [("weather", '{"place": "Z')]),
        ("llama", LLAMA_CALL.partition("her")[0], []),
        ("llama", LLAMA_CALL.partition("ü")[0], [("weather", '{"place": "Z')]),
    ],
)
def test_a_call_that_its_length_ends_is_no_content_and_may_be_sent_back(
    family: str, written: str, calls: list[tuple[str, str]], servers: dict[str, Running]
) -> None:
    running, cut = servers[family], {"max_tokens": len(written)}
    choice = ask(running, f"{CALL if family == 'qwen3' else LLAMA_CALL}", **cut).choices[0]
    assert (choice.finish_reason, choice.message.content or "", calls_of(choice.message)) == ("length", "", calls)
    chunks = [chunk.choices[0] for chunk in ask(running, running.engine.script, stream=True, **cut)]  # type: ignore[attr-defined]
    names = [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or [] if call.function.name]
    assert names == [name for name, _ in calls]
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "length"
    ask(running, "Well.", messages=[USER, choice.message, USER])
    for name, arguments in calls:
        key = "parameters" if family == "llama" else "arguments"
        assert f'{{"name": "{name}", "{key}": {arguments or "{}"}}}' in running.engine.prompts[-1]  # type: ignore[attr-defined]


def test_special_tokens_around_thoughts_are_told_from_their_marks_written_out() -> None:
    tokenizer: Any = SimpleNamespace(token_id={"<think>": 1, "</think>": 2}.get, special_ids={1, 2})
    reading = ToolReading.of(tokenizer, TOOL_FORMATS["qwen3"], TOOLS, has_several=True)
    thoughts = f"</think>{SECOND}"
    parts = [(1, ""), (0, thoughts), (2, ""), (0, CALL)]
    message = whole_message(reading, [StepOutput("a", token_id, text) for token_id, text in parts])
    assert message["content"] == f"<think>{thoughts}</think>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_log_probabilities_of_all_tokens(servers: dict[str, Running]) -> None:
    whole = ask(servers["qwen3"], CALL, logprobs=True).choices[0].logprobs.content
    chunks = ask(servers["qwen3"], CALL, logprobs=True, stream=True)
    parts = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert list(itertools.chain.from_iterable(parts)) == whole


def test_one_call_and_none(servers: dict[str, Running]) -> None:
    running = servers["qwen3"]
    one = ask(running, f"{CALL}\n{SECOND}", parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1
    none = ask(running, CALL, tool_choice="none", tools=[tool("weather", strict=True)]).choices[0]
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (CALL, None, "stop")
    assert '"name": "weather"' in running.engine.prompts[-1], "the tools are in the prompt all the same"
    assert ask(running, CALL, tools=[]).choices[0].message.content == CALL
    none = ask(servers["llama"], LLAMA_CALL, tool_choice="none").choices[0]
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (LLAMA_CALL, None, "stop")


def test_an_answer_goes_back_with_its_results_in_the_order_of_the_calls(servers: dict[str, Running]) -> None:
    running = servers["qwen3"]
    message = ask(running, f"{CALL}\n{SECOND}").choices[0].message
    weather, time = (call.id for call in message.tool_calls)
    results = [
        {"role": "tool", "tool_call_id": time, "content": "noon"},
        {"role": "tool", "tool_call_id": weather, "content": [{"type": "text", "text": "sun"}]},
    ]
    for more, end in ([], ""), ([USER], "<|im_start|>user\nHi<|im_end|>\n"):
        turns = [USER, message, *results, *more]
        assert ask(running, "It is sunny.", messages=turns).choices[0].message.content == "It is sunny."
        assert running.engine.prompts[-1].endswith(
            f"assistant\n{CALL}\n{SECOND}<|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
            f"<tool_response>\nnoon\n</tool_response><|im_end|>\n{end}<|im_start|>assistant\n"
        )
    call = ask(servers["llama"], LLAMA_CALL).choices[0].message
    turns = [turns[0], call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sun"}]
    ask(servers["llama"], "It is sunny.", messages=turns)
    assert (
        f'{LLAMA_CALL}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"sun"<|eot_id|>'
        in (servers["llama"].engine.prompts[-1])
    )


def test_a_history_becomes_turns_with_results_in_the_order_of_their_calls() -> None:
    """Of an assistant alone there are thoughts, and its refusal is its text."""
    calls = [("x", "f", ""), ("y", "g", ' {"a": 1'), ("z", "f", "{}")]
    called = [{"id": name, "function": {"name": function, "arguments": text}} for name, function, text in calls]
    history = [
        {"role": "developer", "content": "a", "reasoning_content": "of none"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
            "reasoning": "of none",
        },
        {"role": "assistant", "tool_calls": called, "reasoning_content": "d", "reasoning": "e"},
        *({"role": "tool", "content": f"of {name}", "tool_call_id": name} for name in "zx"),
        {"role": "assistant", "content": None, "refusal": "f", "reasoning": "g"},
        {"role": "assistant", "tool_calls": called[:2]},
        *({"role": "tool", "content": f"again {name}", "tool_call_id": name} for name in "yx"),
    ]
    made = [ToolCall(function, text or "{}") for _, function, text in calls]
    assert conversation(ChatRequest.model_validate({"model": "m", "messages": history}).messages) == [
        ChatMessage("system", "a"),
        ChatMessage("user", "bc"),
        ChatMessage("assistant", "", tuple(made), "d"),
        *(ChatMessage("tool", f"of {name}") for name in "xz"),
        ChatMessage("assistant", "f", reasoning="g"),
        ChatMessage("assistant", "", tuple(made[:2])),
        *(ChatMessage("tool", f"again {name}") for name in "xy"),
    ]


def test_how_a_prompt_ends(servers: dict[str, Running]) -> None:
    running, begun = servers["qwen3"], {"role": "assistant", "content": "It is "}
    for messages, fields, end in (
        ([USER], {}, "Hi<|im_end|>\n<|im_start|>assistant\n"),
        ([USER], {"add_generation_prompt": True, "continue_final_message": False}, "<|im_start|>assistant\n"),
        ([USER], {"add_generation_prompt": False}, "<|im_start|>user\nHi<|im_end|>\n"),
        ([USER, begun], {"add_generation_prompt": False, "continue_final_message": True}, "</think>\n\nIt is "),
    ):
        ask(running, "sunny", messages=messages, tools=[], extra_body=fields)
        assert running.engine.prompts[-1].endswith(end), fields
    for messages, fields, param in (
        ([USER, begun], {"continue_final_message": True}, "add_generation_prompt"),
        ([USER, begun], {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ([USER], {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        (
            [USER, {"role": "assistant", "tool_calls": [CALLED]}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
        ),
    ):
        with running.client() as client:
            response = client.post("/v1/chat/completions", json=chat(**fields) | {"messages": messages})
        assert_refused(response, param, "continue_final_message is true")


LABELLED: list[tuple[Any, Any]] = [
    ({"role": "user", "content": "a", "name": "Ada", "id": "m1"}, {"role": "user", "content": "a"}),
    (
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "a"},
    ),
    (
        {
            "role": "assistant",
            "content": "a",
            "refusal": None,
            "annotations": [{"type": "url_citation"}],
            "audio": None,
        },
        {"role": "assistant", "content": "a"},
    ),
    ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"role": "assistant", "content": "no"}),
    (
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "reasoning": None},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"},
    ),
    (
        {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_details": [{"text": "hm"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"},
    ),
    (
        {"role": "assistant", "reasoning_content": None, "tool_calls": [{**CALLED, "index": 0}]},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {**CALLED["function"], "parsed_arguments": {}}}]},
        {"role": "assistant", "tool_calls": [CALLED]},
    ),
    (
        {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "time", "arguments": " "}}]},
        {"role": "assistant", "tool_calls": [CALLED]},
    ),
]


@pytest.mark.parametrize(("labelled", "plain"), LABELLED)
def test_labels_of_a_history_are_ignored(labelled: Any, plain: Any, servers: dict[str, Running]) -> None:
    running = servers["qwen3"]
    for message in (labelled, plain):
        results = [RESULT | ({"name": "time"} if message is labelled else {})] if "tool_calls" in message else []
        with running.client() as client:
            response = client.post("/v1/chat/completions", json=chat() | {"messages": [USER, message, *results]})
        assert response.status_code == 200, response.text
    assert running.engine.prompts[-2] == running.engine.prompts[-1], "a label changes the prompt"


RESULT: Any = {"role": "tool", "tool_call_id": "a", "content": "noon"}


def called(**more: Any) -> Any:
    return {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}", **more}}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": [tool("a b")]}, "tools.0.function.name", "string should match pattern"),
        ({"tools": [tool("x" * 65)]}, "tools.0.function.name", "string should match pattern"),
        ({"tools": [tool("a", parameters="{}")]}, "tools.0.function.parameters", "valid dictionary"),
        ({"tools": [tool("a", strict="yes")]}, "tools.0.function.strict", "valid boolean"),
        ({"tools": [{"type": "code", "function": {"name": "a"}}]}, "tools.0.type", "input should be 'function'"),
        ({"tools": [tool("a", more=1)]}, "tools.0.function.more", "unknown"),
        ({"tools": [tool(f"a{n}") for n in range(MAX_TOOLS + 1)]}, "tools", "at most 128 items"),
        ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools", "2 functions with the name a"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice is 'any'; it must be none, auto, required, or an object"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "it must be none, auto"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather", "x": 1}}}, "tool_choice", "must be none"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "the tools are weather"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
        ({"messages": [{**USER, "tool_calls": [called()]}]}, "messages.0", "only an assistant calls tools"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages.0", "no other has it"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages.1", "the role tool needs it"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0", "content is None"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [5]}]}, "messages.1.tool_calls.0", "valid dictionary"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [called(arguments="[]")]}]},
            "messages.1.tool_calls.0.function.arguments",
            "arguments is '[]'; it must be the text of a JSON object, or the beginning of one",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "b"}]},
            "messages.1.tool_call_id",
            "no call of the last assistant message has this id",
        ),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [CALLED]}, RESULT, *between, RESULT]}, param, told)
            for between, param, told in (
                ([], "messages.2.tool_call_id", "'a'; it has a result"),
                ([USER], "messages.3.tool_call_id", "no call of the last assistant message has this id"),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, told: str, client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={**chat(), "tools": TOOLS, **fields})
    assert_refused(response, param, told)


def test_a_model_whose_format_has_no_tools_says_so(servers: dict[str, Running]) -> None:
    with servers["gemma3_text"].client() as client:
        assert_refused(client.post("/v1/chat/completions", json=chat(tools=TOOLS)), "tools")
        turns = [USER, {"role": "assistant", "tool_calls": [called()]}]
        assert_refused(client.post("/v1/chat/completions", json={**chat(), "messages": turns}), "messages")
        for choice in ("auto", "none"):
            assert client.post("/v1/chat/completions", json=chat(tools=[], tool_choice=choice)).is_success


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": [tool("a", strict=True)]}]
)
def test_what_needs_a_grammar_names_the_phase_that_has_it(fields: dict[str, Any], client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={**chat(), "tools": TOOLS, **fields})
    assert_refused(response, "tool_choice" if "tool_choice" in fields else "tools.0.function.strict", "phase 12")


def test_definitions_reach_the_prompt_as_they_were_sent(servers: dict[str, Running]) -> None:
    definition = {"function": {"strict": None, "name": "add", "description": "Zahlen: ü"}, "type": "function"}
    ask(servers["qwen3"], "No.", tools=[definition])
    assert f"<tools>\n{json.dumps(definition, ensure_ascii=False)}\n</tools>" in servers["qwen3"].engine.prompts[-1]
