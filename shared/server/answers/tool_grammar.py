"""The grammar that a request's tools impose on its answer, and the parsing of its calls. Introduced in phase 12.

Invariant: both use the same facts, so exactly what the grammar allows as a call is read as a call.
"""

from dataclasses import replace

from shared.grammar.answer_graph import SPECIAL_MARK, CallMode, CallSpelling
from shared.grammar.calls import CallDescription, CalledFunction
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.server.answers.tool_answer import ToolReading
from shared.server.bodies.protocol import ChatRequest
from shared.server.bodies.structured_output import refusal
from shared.text.thoughts import OPENED, Marks
from shared.text.tokenizer import Tokenizer
from shared.text.tool_format import ToolFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_NO_CALLS = ToolFormat("", "", "", has_several=False)


def thought_marks(
    body: ChatRequest, own: Marks | None, *, is_thinking: bool, has_grammar: bool, has_format: bool
) -> Marks | None:
    """The marks around the thoughts that an answer may begin with; None: it begins without thoughts.

    If the prompt ends inside thoughts (``is_thinking``), the answer continues them. Otherwise the model may think
    first, between the marks ``own``. With a grammar, it may unless ``enable_thinking`` is false. Before a format, which
    a program reads, it may only if ``enable_thinking`` is true, since thoughts are content.
    """
    if is_thinking:
        return OPENED
    asked = body.enable_thinking
    may_think = not has_grammar or (asked is True if has_format else asked is not False)
    return own if may_think else None


def tool_grammar(
    body: ChatRequest,
    tokenizer: Tokenizer,
    form: ToolFormat | None,
    thought: Marks | None,
    answer: Grammar | None = None,
    *,
    is_closed: bool = False,
) -> Grammar:
    """The grammar of an answer that may begin with thoughts and may call the request's tools. Raises ApiError.

    Text outside calls follows the grammar ``answer``, or is free. ``form`` is None if there are no tools. The arguments
    of strict functions must follow their schemas; if a call is required, those of all functions must. Otherwise
    arguments follow a schema if it is supported. ``is_closed``: as for ``Grammar.json_schema``.
    """
    choice, mode = body.tool_choice, _mode(body)
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    spelling = _spelling(
        tokenizer, form or _NO_CALLS, thought, has_several=body.parallel_tool_calls is not False and name is None
    )
    functions = [tool["function"] for tool in body.definitions]
    called = tuple(
        CalledFunction(
            function["name"],
            NO_PARAMETERS if function.get("parameters") is None else function["parameters"],
            is_strict=mode is CallMode.REQUIRED or bool(function.get("strict")),
        )
        for function in functions
        if name in (None, function["name"])
    )
    try:
        described = None if answer is None or mode is CallMode.REQUIRED else (answer.kind.value, answer.text)
        return Grammar.calls(CallDescription(mode, spelling, called, described, is_closed))
    except GrammarError as error:
        raise refusal(error, "tools") from None


def tool_reading(
    body: ChatRequest,
    tokenizer: Tokenizer,
    form: ToolFormat,
    thought: Marks | None,
    *,
    has_grammar: bool,
    has_format: bool,
) -> ToolReading | None:
    """How the calls of the answer are read; None if there can be none.

    Without a grammar a model may write calls in any form. ``has_format``: text outside calls follows another grammar.
    """
    if _mode(body) is CallMode.NONE:
        return None
    return ToolReading.of(
        tokenizer,
        replace(form, thought=thought),
        body.definitions,
        has_several=body.parallel_tool_calls is not False,
        is_spelled=has_grammar,
        is_first=has_grammar and (has_format or _mode(body) is CallMode.REQUIRED),
    )


def _mode(body: ChatRequest) -> CallMode:
    if body.tool_choice == "none" or not body.tools:
        return CallMode.NONE
    return CallMode.AUTO if body.tool_choice in (None, "auto") else CallMode.REQUIRED


def _spelling(tokenizer: Tokenizer, form: ToolFormat, thought: Marks | None, *, has_several: bool) -> CallSpelling:
    """How a format's calls are spelled in a model's vocabulary."""

    def marked(token: str) -> str:
        return SPECIAL_MARK + token if tokenizer.token_id(token) in tokenizer.special_ids else token

    has_hidden = form.hidden_token is not None and tokenizer.token_id(form.hidden_token) is not None
    return CallSpelling(
        trigger=marked(form.opening) if form.opening else "",
        head=form.head,
        middle=form.middle,
        closing="}\n" + marked(form.closing) if form.closing else "}",
        separator="\n" if has_several and form.has_several else None,
        hidden=SPECIAL_MARK + form.hidden_token if has_hidden and form.hidden_token else None,
        thought=thought and (marked(thought[0]), marked(thought[1])),
    )
