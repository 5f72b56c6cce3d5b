"""Calls in the text of a model: read piece by piece, broken ones given back, and no part of a trigger as content."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.text.thoughts import OPENED, Marks
from shared.text.tool_format import TOOL_FORMATS
from shared.text.tools import CallArguments, CallStart, Content, Delta, ToolParser

NAMES = ("weather", "add", "add_all")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
WHOLE = '{"name": "add", "parameters": {}}'


def read(
    form: str, pieces: Sequence[str], *, is_cut: bool = False, thought: Marks | None = None, **how: bool
) -> list[Delta]:
    """The deltas, those of one kind joined."""
    written = replace(TOOL_FORMATS[form], **({"thought": thought} if thought else {}))
    parser = ToolParser(written, NAMES, **how)
    joined: list[Delta] = []
    for delta in [*(delta for piece in pieces for delta in parser.push(piece)), *parser.flush(is_cut=is_cut)]:
        last = joined[-1] if joined else None
        if isinstance(delta, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def added(index: int = 0, arguments: str = '{"a": 1}') -> list[Delta]:
    return [CallStart(index, "add"), CallArguments(index, arguments)]


THOUGHT = f"<think>\nperhaps {CALL}?\n</think>"
NESTED = '{"s": "}\\"]</tool_call>"}'
UNKNOWN = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
NO_OBJECT = '<tool_call>\n{"name": "add", "arguments": "no object"}</tool_call>'
EMPTY = '<tool_call>{"name": "add", "arguments": {}}'
HERMES: list[tuple[str, list[Delta]]] = [
    ("No call at all.\n", [Content("No call at all.\n")]),
    (CALL, added()),
    (f"I add.\n\n{CALL}", [Content("I add."), *added()]),
    (f"{CALL}\n{CALL}\n", [*added(0), *added(1)]),
    (f"{CALL} and {CALL}", [*added(0), Content(" and"), *added(1)]),
    (f"{THOUGHT}\n\n{CALL}", [Content(THOUGHT), *added()]),
    (
        f'<tool_call>{{"arguments": {NESTED}, "name": "weather"}}</tool_call>',
        [CallStart(0, "weather"), CallArguments(0, NESTED)],
    ),
    (
        '<tool_call>{"type": "function", "id": -1.5e3, "x\ny": [{"y": ["}"]}], "name": "add"}</tool_call>',
        added(arguments="{}"),
    ),
    (
        '<tool_call>{"name": "add", "name": "weather", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>',
        added(),
    ),
    (UNKNOWN, [Content(UNKNOWN)]),
    (f"a < b <tool_call> c <tool_call>{CALL}", [Content("a < b <tool_call> c <tool_call>"), *added()]),
    (f"{NO_OBJECT}\n{CALL}", [Content(NO_OBJECT), *added()]),
    (
        '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call> after',
        [*added(arguments='{"a": [1'), Content("}}</tool_call> after")],
    ),
    ('<tool_call>{"name": "add", "arguments": {"a": "cut o', added(arguments='{"a": "cut o')),
    (f"{EMPTY}\n</tool_c", added(arguments="{}")),
    (f"{EMPTY} more", [*added(arguments="{}"), Content(" more")]),
    ("half a <tool_ca", [Content("half a <tool_ca")]),
]
LLAMA: list[tuple[str, list[Delta]]] = [
    ('{"name": "add", "parameters": {"a": {"b": [1, 2]}}}', added(arguments='{"a": {"b": [1, 2]}}')),
    (' {"type": "function", "name": "add", "parameters": {}}\n', added(arguments="{}")),
    (f"{WHOLE}; {WHOLE}", [*added(arguments="{}"), Content(f"; {WHOLE}")]),
    ('{"name": "Ada", "born": 1815}', [Content('{"name": "Ada", "born": 1815}')]),
    ('{"name": "add", "parameters": {"a": 1', added(arguments='{"a": 1')),
    (f"It is {WHOLE}", [Content(f"It is {WHOLE}")]),
]


@pytest.mark.parametrize(
    ("form", "text", "expected"), [*(("qwen3", *each) for each in HERMES), *(("llama3", *each) for each in LLAMA)]
)
def test_calls_in_a_text(form: str, text: str, expected: list[Delta]) -> None:
    assert read(form, [text]) == expected


NAMED = '<tool_call>\n{"name": "add"'
CUT: list[tuple[str, str, list[Delta]]] = [
    ("qwen3", "So:\n<tool_ca", [Content("So:")]),
    ("qwen3", NAMED[:-2], []),
    ("qwen3", NAMED, [CallStart(0, "add")]),
    ("qwen3", f'{NAMED}, "arguments": ', [CallStart(0, "add")]),
    ("qwen3", f'{NAMED}, "arguments": {{"a": "b', added(arguments='{"a": "b')),
    ("qwen3", f"{CALL}\n<tool_call>\n{{", added()),
    ("qwen3", f"{THOUGHT[:20]}", [Content(THOUGHT[:20])]),
    ("qwen3", UNKNOWN[:-20], [Content(UNKNOWN[:-20])]),
    ("qwen3", "a \n", [Content("a \n")]),
    ("llama3", '{"name": "ad', []),
    ("llama3", '{"name": "add"', [CallStart(0, "add")]),
    ("llama3", '{"name": "Ad"', [Content('{"name": "Ad"')]),
    ("llama3", '{"born": 1815, "na', [Content('{"born": 1815, "na')]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CUT)
@pytest.mark.parametrize("is_spelled", [False, True])
def test_a_call_that_a_limit_cuts(form: str, text: str, expected: list[Delta], is_spelled: bool) -> None:
    assert read(form, [text], is_cut=True, is_spelled=is_spelled) == expected
    assert read(form, list(text), is_cut=True, is_spelled=is_spelled) == expected


OTHERWISE = ('{"name":"add","parameters":{}}', '{"parameters": {}, "name": "add"}', '{"x": 1, "name": "add"}')


@pytest.mark.parametrize(
    ("form", "text", "is_first", "expected"),
    [
        *(("llama3", text, False, [Content(text)]) for text in OTHERWISE),
        ("llama3", f" \n{WHOLE}", False, added(arguments="{}")),
        ("qwen3", f"a {CALL}", False, [Content("a"), *added()]),
        ("qwen3", CALL.replace("add", "add_all"), False, [CallStart(0, "add_all"), *added()[1:]]),
        *(
            ("qwen3", text, False, [Content(text)])
            for text in (CALL.replace("add", name) for name in ("ad", "add_", ""))
        ),
        ("qwen3", f"a {CALL}", True, [Content(f"a {CALL}")]),
        ("qwen3", f"\n{CALL}", True, [Content(f"\n{CALL}")]),
        ("llama3", f" {WHOLE}", True, [Content(f" {WHOLE}")]),
        ("qwen3", f"{THOUGHT}\n\n{CALL}\n{CALL}", True, [Content(THOUGHT), *added(0), *added(1)]),
        ("qwen3", f"{THOUGHT}\n\na{CALL}", True, [Content(f"{THOUGHT}\n\na{CALL}")]),
    ],
)
def test_where_a_grammar_spells_calls_its_spelling_alone_is_one(
    form: str, text: str, is_first: bool, expected: list[Delta]
) -> None:
    assert read(form, list(text), is_spelled=True, is_first=is_first) == expected


def test_thinking_is_content_where_the_format_has_none() -> None:
    assert read("chatml", [f"{THOUGHT}\n\n{CALL}"])[:2] == [Content("<think>\nperhaps"), CallStart(0, "add")]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("form", "call"), [("chatml", CALL), ("llama3", WHOLE)])
def test_thoughts_that_the_prompt_has_opened_come_first(form: str, call: str, is_first: bool) -> None:
    """At every division: their content is not a call, and the answer begins after them."""
    thoughts = f"{call}?\n</think>"
    for text, expected in (
        (f"{thoughts}\n\n{call}", [Content(thoughts), CallStart(0, "add")]),
        (f"{call} never closed", [Content(f"{call} never closed")]),
        ("\n", [Content("\n")]),
    ):
        for cut in range(len(text)):
            found = read(form, [text[:cut], text[cut:]], thought=OPENED, is_first=is_first)
            assert found[:2] == expected, cut


def test_one_call_at_most() -> None:
    assert read("qwen3", [f"{CALL}\n{CALL}"], has_several=False) == [*added(), Content(f"\n{CALL}")]


PARTS = ("<think>", "</think>", "\n", "<tool_call>", "</tool_call>", '{"name": "add"', "}", "<")
MIXED = st.lists(st.sampled_from([*(text for text, _ in [*HERMES, *LLAMA]), *PARTS]), max_size=6).map("".join)


@given(st.sampled_from(sorted(TOOL_FORMATS)), MIXED, st.lists(st.integers(0, 400), max_size=12), st.data())
def test_any_division_of_a_text_gives_the_same(form: str, text: str, cuts: list[int], data: st.DataObject) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[first:last] for first, last in itertools.pairwise(places)]
    how = {name: data.draw(st.booleans(), name) for name in ("has_several", "is_spelled", "is_first", "is_cut")}
    whole = read(form, [text], **how)
    assert read(form, pieces, **how) == whole
    assert read(form, list(text), **how) == whole


@given(MIXED)
def test_calls_and_contents_are_parts_of_the_text_in_order(text: str) -> None:
    at = 0
    for delta in read("chatml", [text]):
        part = delta.name if isinstance(delta, CallStart) else delta.text
        assert isinstance(delta, CallArguments | CallStart) or delta.text in text[at:] or delta.text == "{}"
        if isinstance(delta, Content):
            at = text.index(part, at) + len(part)


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists
        ),
    )
)
def test_arguments_come_as_they_were_generated(arguments: dict[str, object]) -> None:
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=2)):
        assert read("qwen3", list(f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>')) == added(0, text)


def test_content_is_not_held_longer_than_it_may_begin_a_trigger() -> None:
    parser = ToolParser(TOOL_FORMATS["chatml"], NAMES)
    assert parser.push("abc <tool") == [Content("abc")]
    assert parser.push("box>") == [Content(" <toolbox>")]
