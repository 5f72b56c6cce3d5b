"""The grammar that the tools of a request give its answer, and the reading of its calls. Introduced in phase 12.

Invariant: both are made of the same facts, so what is read as a call is what the grammar let through as one.
"""

from dataclasses import replace

from shared.grammar.answer_graph import SPECIAL_MARK, CallMode, CallSpelling
from shared.grammar.calls import CallDescription, CalledFunction
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.server.protocol import ChatRequest
from shared.server.structured_output import refusal
from shared.server.tool_answer import ToolReading
from shared.text.tokenizer import Tokenizer
from shared.text.tool_format import ToolFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    body: ChatRequest,
    tokenizer: Tokenizer,
    form: ToolFormat,
    answer: Grammar | None = None,
    *,
    is_closed: bool = False,
) -> Grammar:
    """The grammar of an answer to a request with tools; what is no call is of the grammar ``answer``, or free text.

    The model may think first unless ``enable_thinking`` is false. Thoughts are content, so before a format, which a
    program reads, it may only if ``enable_thinking`` is true.

    The arguments of strict functions must follow their schemas, and those of all functions where there must be a call;
    of the others, those whose schemas are supported do. ``is_closed``: as of ``Grammar.json_schema``. Raises ApiError.
    """
    choice, mode = body.tool_choice, _mode(body)
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    spelling = _spelling(
        tokenizer,
        form,
        has_several=body.parallel_tool_calls is not False and name is None,
        may_think=_may_think(body, has_format=answer is not None),
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
    body: ChatRequest, tokenizer: Tokenizer, form: ToolFormat, *, has_grammar: bool, has_format: bool
) -> ToolReading | None:
    """How the calls of the answer are read; None where there can be none.

    Without a grammar a model writes calls as it likes. ``has_format``: what is no call follows another grammar.
    """
    if _mode(body) is CallMode.NONE:
        return None
    if has_grammar and not _may_think(body, has_format=has_format):
        form = replace(form, thought=None)
    return ToolReading.of(
        tokenizer,
        form,
        body.definitions,
        has_several=body.parallel_tool_calls is not False,
        is_spelled=has_grammar,
        is_first=has_grammar and (has_format or _mode(body) is CallMode.REQUIRED),
    )


def _mode(body: ChatRequest) -> CallMode:
    if body.tool_choice == "none" or not body.tools:
        return CallMode.NONE
    return CallMode.AUTO if body.tool_choice in (None, "auto") else CallMode.REQUIRED


def _may_think(body: ChatRequest, *, has_format: bool) -> bool:
    asked = body.chat_template_kwargs and body.chat_template_kwargs.enable_thinking
    return asked is True if has_format else asked is not False


def _spelling(tokenizer: Tokenizer, form: ToolFormat, *, has_several: bool, may_think: bool) -> CallSpelling:
    """How a format's calls are spelled in the vocabulary of a model."""

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
        thought=form.thought if may_think else None,
    )
