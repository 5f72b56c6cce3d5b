"""Grammars of answers with calls: what each mode accepts, arguments by their schemas, special tokens by name alone."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.grammar.answer_graph import SPECIAL_MARK, CallMode, CallSpelling
from shared.grammar.automata.automaton import START, Automaton
from shared.grammar.automata.joining import Graph, document, joined
from shared.grammar.calls import CallDescription, CalledFunction, compile_calls
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.grammar import Grammar
from shared.grammar.limits import Budget, GrammarError, Limits, WorkError
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.text.tool_format import TOOL_FORMATS
from shared.text.tools import CallArguments, CallStart, ToolParser
from tests.grammars import UNTIMED, assert_language, budget

ALL_BYTES = np.ones(256, np.bool_)
HERMES = CallSpelling("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
QWEN = replace(HERMES, thought=("<think>", "</think>"))
LLAMA = CallSpelling("", '{"name": "', '", "parameters": ', "}", hidden=f"{SPECIAL_MARK}<|python_tag|>")
ADD = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "value": {"type": "string", "maxLength": 3}},
    "additionalProperties": False,
    "minProperties": 1,
}
FUNCTIONS = (CalledFunction("add_tree", TREE, True), CalledFunction("add", ADD, True))


def compiled(
    mode: CallMode,
    spelling: CallSpelling,
    functions: tuple[CalledFunction, ...] = FUNCTIONS,
    form: Grammar | None = None,
    limits: Limits = UNTIMED,
) -> Automaton:
    described = CallDescription(mode, spelling, functions, form and (form.kind.value, form.text))
    grammar = Grammar.calls(described).compiled(ALL_BYTES, limits)
    assert grammar.automaton is not None
    return grammar.automaton


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD = hermes("add", '{"a": 1}')
TREES = hermes("add_tree", '{"left": {"value": "x"}}')
BAD = [hermes("add", '{"a": "1"}'), hermes("sub", '{"a": 1}'), hermes("add_tree", "{}"), hermes("add", '{"left": {}}')]
THOUGHT = f"<think>\n1 < 2, {BAD[0]} </thin k>\n</think>"


@pytest.mark.parametrize("spelling", [HERMES, QWEN])
def test_free_text_that_may_call(spelling: CallSpelling) -> None:
    free = ("", "Hello {", "a <tool_call", "<<tool_<tool_cal", "é字🙂" * 3, "<thin")
    calls = (GOOD, f"So:\n{GOOD}", f"{GOOD}\n{TREES}\n{GOOD}")
    wrong = ("<tool_call>", *BAD, f"{GOOD} and", GOOD[:-1], f"{GOOD}\n", f"{GOOD}\n{BAD[0]}")
    wrong += (f"{THOUGHT}\n\n{BAD[0]}", f"<thinking>{BAD[0]}")
    thoughts = (f"{THOUGHT}\n\n{GOOD}", f" \n{THOUGHT}So: {GOOD}")
    right, wrong = ((*thoughts,), wrong) if spelling is QWEN else ((), (*wrong, *thoughts))
    assert_language(compiled(CallMode.AUTO, spelling), (*free, *calls, *right), wrong)


def test_each_of_several_functions_has_arguments_of_its_schema() -> None:
    """Which use all actions of an automaton: keys, guards, choices between alternatives, counted characters."""
    kinds = [{"type": "array"}, {"type": "array", "items": {"type": "null"}}, {"pattern": "^x"}, {"const": 1}]
    tagged = [{"type": "object", "properties": {"a": {"const": n}, "b": kind}} for n, kind in enumerate(kinds)]
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    schema = {"properties": {"t": {"anyOf": tagged}, "u": unique, "s": {"type": "string", "maxLength": 40}}}
    right = ['{"t": {"b": [null], "a": 1}}', '{"t": {"b": "xy", "a": 2}, "u": [2, 1]}', f'{{"s": "{"y" * 40}"}}']
    wrong = ['{"t": {"b": [0], "a": 1}}', '{"t": {"b": "y", "a": 2}}', '{"u": [1, 1]}', f'{{"s": "{"y" * 41}"}}']
    functions = (*FUNCTIONS, *(CalledFunction(name, schema, True) for name in "fg"))
    texts = [[hermes(name, text) for name in "fg" for text in some] for some in (right, wrong)]
    assert_language(compiled(CallMode.REQUIRED, HERMES, functions), *texts)


def test_what_follows_a_document_may_be_nothing() -> None:
    graph = Graph()
    start, end = graph.state(), graph.state(is_final=True)
    graph.word(start, b"x", document(0))
    assert_language(
        joined(graph, [compile_schema({"type": "object"} | ADD, budget())], end),
        ['x{"a": 1}'],
        ['x{"a": 1}x', "x", '{"a": 1}'],
    )


def test_each_function_has_what_its_own_keys_demand() -> None:
    """The keys of both have the same places: what the first demands would refuse the arguments of the second."""
    one = {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "additionalProperties": False}
    two = {"properties": {"c": {}, "d": {}}, "required": ["d"], "additionalProperties": False}
    functions = (CalledFunction("f", one, True), CalledFunction("g", two, True))
    automaton = compiled(CallMode.REQUIRED, HERMES, functions)
    right = [hermes("f", '{"b": 1}'), hermes("f", '{"a": 1, "b": 1}'), hermes("g", '{"d": 1}')]
    assert_language(automaton, right, [hermes("f", '{"a": 1}'), hermes("g", '{"c": 1}')])


def test_a_trigger_that_begins_again_inside_itself_is_found() -> None:
    automaton = compiled(CallMode.AUTO, replace(HERMES, trigger="<<t<<tool>"))
    for before in ("", "<", "<<t", "<<t<<t", "<<t<<to<<t"):
        assert_language(
            automaton, [before + GOOD.replace("<tool_call>", "<<t<<tool>"), before], [f"{before}<<t<<tool>"]
        )


FORMATS = {
    '{"a": 5}': Grammar.json_schema({"type": "object", **ADD}),
    "12345": Grammar.regex(r"\d+"),
    "red": Grammar.choice(["red", "green", "reddish"]),
}


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("mode", [CallMode.AUTO, CallMode.NONE])
def test_calls_or_a_format(text: str, mode: CallMode) -> None:
    """Either calls, or one text of the format, which ends as it does by itself; after thoughts too."""
    form = FORMATS[text]
    description = CallDescription(mode, QWEN, FUNCTIONS, (form.kind.value, form.text))
    automaton = compiled(mode, QWEN, form=form)
    assert CallDescription.of_text(description.text) == description
    right = [text, f"{THOUGHT}{text}", f"{THOUGHT}\n\n{text}"]
    wrong = ["", "So", f"{text} ", f"{text}\n{GOOD}", f"\n{text}", f"{GOOD}{text}", f"{THOUGHT}\n\n\n{text}", *BAD]
    (right if mode is CallMode.AUTO else wrong).extend((GOOD, f"{THOUGHT}\n{GOOD}\n{TREES}"))
    assert_language(automaton, right, wrong)
    alone = form.compiled(ALL_BYTES, UNTIMED).automaton
    assert alone is not None
    for length in range(1, len(text)):
        assert automaton.accepts(text[:length].encode()) == alone.accepts(text[:length].encode())


def test_a_format_may_be_empty_and_may_not_begin_as_a_call() -> None:
    empty = compiled(CallMode.AUTO, QWEN, form=Grammar.regex("[0-9]*"))
    assert_language(empty, ["", "12", THOUGHT, f"{THOUGHT}\n", GOOD], ["So", f"{GOOD}1"])
    for spelling, form in ((LLAMA, FORMATS['{"a": 5}']), (HERMES, Grammar.regex("<[a-z]+>"))):
        with pytest.raises(GrammarError, match="can begin as what may stand before it does"):
            compiled(CallMode.AUTO, spelling, form=form)


@pytest.mark.parametrize("spelling", [HERMES, QWEN])
def test_calls_alone(spelling: CallSpelling) -> None:
    thoughts = [f"{THOUGHT}{blank}{GOOD}" for blank in ("", "\n", "\n\n")]
    right, wrong = [GOOD, f"{GOOD}\n{TREES}"], ["", "So:", f" {GOOD}", *BAD, f"{GOOD}\n", THOUGHT]
    wrong += [f"{THOUGHT}\n\n\n{GOOD}", f"{THOUGHT} a{GOOD}"]
    (right if spelling is QWEN else wrong).extend(thoughts)
    assert_language(compiled(CallMode.REQUIRED, spelling), right, wrong)
    assert_language(compiled(CallMode.REQUIRED, replace(spelling, separator=None)), [GOOD], [f"{GOOD}\n{GOOD}"])


def begun(spelling: CallSpelling) -> CallSpelling:
    """How it spells answers whose prompt has opened the thoughts."""
    return replace(spelling, thought=("", "</think>"))


LLAMA_GOOD = '{"name": "add", "parameters": {"a": 1}}'
LLAMA_BAD = LLAMA_GOOD.replace("1", '"1"')
REST = THOUGHT.removeprefix("<think>")


@pytest.mark.parametrize(
    ("mode", "spelling", "form", "right", "wrong"),
    [
        (CallMode.AUTO, HERMES, None, ["", f"{GOOD} a", BAD[0], f"{REST}a", f"{REST}\n\n{GOOD}"], [f"{REST}{BAD[0]}"]),
        (CallMode.NONE, HERMES, None, ["", GOOD, f"{REST}a"], [f"{REST}{GOOD}"]),
        (CallMode.REQUIRED, HERMES, None, [f"{REST}{GOOD}", f"{REST}\n\n{GOOD}"], ["", GOOD, REST, f"{REST}a{GOOD}"]),
        (CallMode.AUTO, HERMES, "red", [f"{REST}\nred", f"{REST}{GOOD}"], ["red", GOOD, REST, f"{REST} red"]),
        (CallMode.NONE, HERMES, "red", [f"{REST}\nred", f"{GOOD}</think>red"], ["red", REST, f"{REST}{GOOD}"]),
        (
            CallMode.AUTO,
            LLAMA,
            None,
            ["", LLAMA_BAD, f"{REST}\n{LLAMA_GOOD}", f"{REST} a"],
            [f"{REST}\n{LLAMA_BAD}"[:-1] + ";"],
        ),
        (CallMode.REQUIRED, LLAMA, None, [f"{REST}\n{LLAMA_GOOD}"], ["", LLAMA_GOOD, f"{REST}{LLAMA_BAD}"]),
    ],
)
def test_thoughts_that_the_prompt_has_opened_come_first(
    mode: CallMode, spelling: CallSpelling, form: str | None, right: list[str], wrong: list[str]
) -> None:
    assert_language(compiled(mode, begun(spelling), form=form and FORMATS[form]), right, wrong)


def test_thoughts_between_special_tokens() -> None:
    opening, closing = (f"{SPECIAL_MARK}<{slash}think>" for slash in ("", "/"))
    inner = REST.removesuffix("</think>").encode()
    for thought in ((opening, closing), ("", closing)):
        begin = b"\xff<think>" * bool(thought[0])
        automaton = compiled(CallMode.AUTO, replace(HERMES, thought=thought))
        assert_language(
            automaton,
            [begin + inner + b"\xff</think>\n" + GOOD.encode()],
            [begin + REST.encode() + BAD[0].encode() + b"\xff<think>"],
        )


def test_no_calls() -> None:
    right = ("", "Hello", "<tool_call", THOUGHT, f"{THOUGHT}\n\nHello")
    assert_language(compiled(CallMode.NONE, QWEN), right, [f"Hello {GOOD}"])
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert_language(compiled(CallMode.NONE, LLAMA), ['{"name": "add", "born": 1815}'], [call])


def test_a_call_that_is_the_whole_answer() -> None:
    good, bad = b'{"name": "add", "parameters": {"a": 1}}', b'{"name": "add", "parameters": {"a": "1"}}'
    tag, name = b"\xff<|python_tag|>", b'{"name": "Ada"}'
    free = (b"", b"Hello", name, b'{"name": "add", "param', b"\n" + good, b"So " + bad)
    wrong = (bad, good + b";", good + b"\n" + good, tag, tag + b"Hello", b" " + bad)
    assert_language(compiled(CallMode.AUTO, LLAMA), (*free, good, tag + good), wrong)
    refused = (b"", b"Hello", name, b"\n" + good, bad, tag + bad)
    assert_language(compiled(CallMode.REQUIRED, LLAMA), (good, tag + good), refused)


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"add","parameters":{"a":"1"}}',
        '{"parameters": {"a": "1"}, "name": "add"}',
        '{"type": "function", "name": "add", "parameters": {"a": "1"}}',
    ],
)
def test_free_text_that_is_nearly_a_call_is_not_read_as_one(text: str) -> None:
    """Its arguments follow no schema."""
    assert compiled(CallMode.AUTO, LLAMA).accepts(text.encode())
    parser = ToolParser(TOOL_FORMATS["llama3"], ["add", "add_tree"], is_spelled=True)
    assert "".join(delta.text for delta in [*parser.push(text), *parser.flush()]) == text  # type: ignore[union-attr]
    assert parser.num_calls == 0


def test_what_is_not_supported() -> None:
    repeated = {"properties": {"a": {"type": "string", "pattern": r"^(x|y)\1$"}}}
    with pytest.raises(GrammarError, match=re.escape("The arguments of f: ") + ".*#/properties/a/pattern"):
        compiled(CallMode.REQUIRED, QWEN, (CalledFunction("f", repeated, True),))
    lax = compiled(CallMode.AUTO, QWEN, (CalledFunction("f", repeated, False), *FUNCTIONS))
    assert lax.accepts(hermes("f", '{"b": [1]}').encode())
    assert not lax.accepts(hermes("f", "[]").encode())
    assert not lax.accepts(BAD[0].encode())
    with pytest.raises(GrammarError, match="must be of an object"):
        compiled(CallMode.REQUIRED, QWEN, (CalledFunction("f", {"type": "array"}, True),))
    some, limits = (
        [CalledFunction(name, {"properties": {"a": {"pattern": "^(xy){200}$"}}}, True) for name in "fgh"],
        1400,
    )
    for functions, form in ((some, None), (some[:2], Grammar.regex("[0-9]{300}"))):
        whole = compiled(CallMode.AUTO, QWEN, tuple(functions[:-1]), form, replace(UNTIMED, states=limits))
        assert whole.num_states < limits
        with pytest.raises(GrammarError, match="more than 1400 states"):
            compiled(CallMode.AUTO, QWEN, tuple(functions), form, replace(UNTIMED, states=limits))


@pytest.mark.parametrize("limits", [replace(UNTIMED, states=4000), UNTIMED], ids=["states", "work"])
def test_a_costly_schema_that_need_not_be_followed_is_some_object(limits: Limits) -> None:
    """Whatever it has spent, the functions beside it are followed. A first try does not drop it."""
    costly = [{"properties": {"a": {"pattern": f"^({x}|y)*{x}({x}|y){{12}}$"}}} for x in "ab"]
    free = [CalledFunction(f"f{number}", schema, False) for number, schema in enumerate(costly)]
    functions = (*free, replace(FUNCTIONS[1], is_strict=False), FUNCTIONS[0])
    described = CallDescription(CallMode.REQUIRED, HERMES, functions)
    found = compile_calls(described, None, ALL_BYTES, Budget(limits))
    assert_language(
        found, [GOOD, TREES, *(hermes(each.name, '{"a": "z"}') for each in free)], [*BAD, hermes("f0", "1")]
    )
    if limits == UNTIMED:
        with pytest.raises(WorkError):
            compile_calls(described, None, ALL_BYTES, Budget(replace(limits, drops=False)))


def test_many_functions_that_need_not_be_followed() -> None:
    """However many there are, and however many of their schemas are dropped."""
    small = {f"{name}{n}": {"type": kind} for n in range(2) for name, kind in (("a", "string"), ("b", "integer"))}
    functions = [CalledFunction(f"f{number:03}", {"properties": small}, False) for number in range(128)]
    found = compiled(CallMode.AUTO, HERMES, tuple(functions), None, Limits())
    assert found.accepts(hermes("f127", '{"a0": "x"}').encode())
    assert not found.accepts(hermes("f000", '{"a0": 1}').encode())
    assert not found.accepts(hermes("f128", "{}").encode())
    costly = {"properties": {"p": {"type": "string", "pattern": "(a|b)*a(a|b){17}"}}}
    dropped = [CalledFunction(f"g{number}", costly, False) for number in range(12)]
    found = compiled(CallMode.AUTO, HERMES, (*dropped, *FUNCTIONS), None, Limits())
    assert found.accepts(hermes("g11", '{"p": 1}').encode())
    assert not found.accepts(BAD[0].encode())


def test_arguments_are_closed_objects_if_that_is_asked_for() -> None:
    schema = {"properties": {"a": {"type": "integer"}}}
    for is_closed in (False, True):
        described = CallDescription(
            CallMode.REQUIRED, HERMES, (CalledFunction("f", schema, True),), is_closed=is_closed
        )
        automaton = Grammar.calls(described).compiled(ALL_BYTES, UNTIMED).automaton
        assert automaton is not None
        assert automaton.accepts(hermes("f", '{"a": 1}').encode())
        assert automaton.accepts(hermes("f", '{"b": 1}').encode()) != is_closed


def vocabulary(*special: str) -> GrammarVocabulary:
    tokens = [bytes([byte]) for byte in range(255)] + [f"\xff{name}".encode("latin-1") for name in special]
    return GrammarVocabulary.of_tokens([*tokens, b"", b"<tool_", b'call>\n{"na', b'{"a": '], [len(tokens)])


def test_only_special_tokens_that_the_grammar_names_are_allowed() -> None:
    words = vocabulary("<tool_call>", "</tool_call>", "<|im_start|>", "<|python_tag|>")
    opening, closing, start, tag, end = range(255, 260)
    special = replace(
        HERMES, trigger=SPECIAL_MARK + HERMES.trigger, closing=f"}}\n{SPECIAL_MARK}</tool_call>", separator="\n"
    )
    fsm = TokenFSM(compiled(CallMode.AUTO, special), words)
    state = fsm.initial_state
    for token_id in (ord("a"), opening, *b'\n{"name": "add", "arguments": {"a": 1}}\n', closing):
        allowed = set(fsm.allowed_tokens(state))
        assert token_id in allowed
        assert allowed & {opening, closing, start, tag, end} in ({opening, end}, {closing}, set()), state
        assert fsm.mask(state).nonzero()[0].tolist() == sorted(allowed)
        following = fsm.next_state(state, token_id)
        assert following is not None
        state = following
    assert fsm.is_terminal(state)
    plain = TokenFSM(Grammar.json_object().compiled(words.usable_bytes, UNTIMED).automaton, words)  # type: ignore[arg-type]
    now = plain.automaton.walk(START, b'{"a": "')
    assert now is not None
    assert not {opening, closing, start, tag} & set(plain.allowed_tokens(now))


@settings(max_examples=20)
@given(
    st.sampled_from(CallMode),
    st.sampled_from([HERMES, QWEN, LLAMA, begun(HERMES), begun(LLAMA)]),
    st.sampled_from([None, *FORMATS.values()]),
    st.randoms(use_true_random=False),
)
def test_every_walk_comes_to_an_end_and_what_it_writes_is_read(
    mode: CallMode, spelling: CallSpelling, form: Grammar | None, random: Any
) -> None:
    """Random tokens of the grammar: masks as the definition says, no dead end, and the parser finds the calls."""
    words = vocabulary("<|python_tag|>")
    has_format = mode is not CallMode.REQUIRED and spelling.trigger != ""
    fsm = TokenFSM(compiled(mode, spelling, form=form if has_format else None), words)
    state, text = fsm.initial_state, b""
    for length in range(250):
        allowed = np.flatnonzero(fsm.mask(state)).tolist()
        assert allowed
        assert length % 20 or allowed == fsm.allowed_tokens(state)
        is_end = fsm.is_terminal(state)
        if is_end and random.random() < 0.05:
            break
        token_id = random.choice([token_id for token_id in allowed if words.tokens[token_id]] or [-1])
        if token_id < 0:
            break
        text += words.tokens[token_id]
        state = fsm.next_state(state, token_id)  # type: ignore[assignment]
    if not fsm.is_terminal(state):
        return
    written = replace(TOOL_FORMATS["chatml" if spelling.trigger else "llama3"], thought=spelling.thought)
    is_first = has_format or mode is CallMode.REQUIRED
    parser = ToolParser(written, ["add", "add_tree"], is_spelled=True, is_first=is_first)
    read = text.replace(b"\xff<|python_tag|>", b"").decode(errors="replace")
    deltas = [*parser.push(read), *parser.flush()]
    if mode is not CallMode.AUTO:
        assert (parser.num_calls > 0) == (mode is CallMode.REQUIRED)
    if mode is CallMode.REQUIRED:
        for delta in deltas:
            assert not isinstance(delta, CallArguments) or isinstance(json.loads(delta.text), dict)
        assert sum(isinstance(delta, CallStart) for delta in deltas) == parser.num_calls
