"""The grammar that the tools of a request give its answer. Introduced in phase 12."""

from shared.grammar.answer_graph import SPECIAL_MARK, CallMode, CallSpelling
from shared.grammar.calls import CallDescription, CalledFunction
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.server.protocol import ChatRequest
from shared.server.structured_output import refusal
from shared.text.tokenizer import Tokenizer
from shared.text.tools import ToolFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(body: ChatRequest, tokenizer: Tokenizer, form: ToolFormat, answer: Grammar | None = None) -> Grammar:
    """The grammar of an answer to a request with tools; what is no call is of the grammar ``answer``, or free text.

    The model may think first unless ``enable_thinking`` is false. Thoughts are content, so before a format, which a
    program reads, it may only if ``enable_thinking`` is true.

    The arguments of strict functions must follow their schemas, and those of all functions where there must be a call;
    of the others, those whose schemas are supported do. Raises ApiError.
    """
    choice = body.tool_choice
    may_think = body.chat_template_kwargs and body.chat_template_kwargs.enable_thinking
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    is_none = choice == "none" or not body.tools
    mode = CallMode.NONE if is_none else CallMode.AUTO if choice in (None, "auto") else CallMode.REQUIRED
    spelling = _spelling(
        tokenizer,
        form,
        has_several=body.parallel_tool_calls is not False and name is None,
        may_think=may_think is True if answer is not None else may_think is not False,
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
        return Grammar.calls(CallDescription(mode, spelling, called, described))
    except GrammarError as error:
        raise refusal(error, "tools") from None


def _spelling(tokenizer: Tokenizer, form: ToolFormat, *, has_several: bool, may_think: bool) -> CallSpelling:
    """How a format's calls are spelled in the vocabulary of a model."""

    def marked(token: str) -> str:
        return SPECIAL_MARK + token if tokenizer.token_id(token) in tokenizer.special_ids else token

    line = "\n" if form.opening else ""
    has_hidden = form.hidden_token is not None and tokenizer.token_id(form.hidden_token) is not None
    return CallSpelling(
        trigger=marked(form.opening) if form.opening else "",
        head=line + '{"name": "',
        middle=f'", "{form.arguments_key}": ',
        closing="}" + line + (marked(form.closing) if form.closing else ""),
        separator="\n" if has_several and form.has_several else None,
        hidden=SPECIAL_MARK + form.hidden_token if has_hidden and form.hidden_token else None,
        thought=form.thought if may_think else None,
    )
