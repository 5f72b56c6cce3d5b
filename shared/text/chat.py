"""Conversations as prompts, using our own Jinja2 templates. Introduced in phase 2.

An instruction-tuned model answers well only in the exact format it was trained on, down to a newline. Checkpoints
include a template for it, which is untrusted code; ours are few, short and readable, and are compared with theirs
(`chat_format`). They are nevertheless rendered in an immutable sandbox.

Invariant: for messages of plain text, `encode_chat` gives the ids of transformers' ``apply_chat_template`` on the
official checkpoint: one BOS where the family has one, never two. Text inside a message never becomes a control token,
and only an assistant's own text becomes a mark of thoughts or calls.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ModelFolderError, RequestError
from shared.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
ROLES = ("system", "user", "assistant", "tool")
# (family, a token that the tokenizer must have, template): the first matching row is used.
TEMPLATE_CHOICES = (
    ("llama", "<|start_header_id|>", "llama3"),
    ("llama", "<|im_start|>", "chatml"),
    ("qwen3", "<|im_start|>", "qwen3"),
    ("gemma3_text", "<start_of_turn>", "gemma3"),
)
# The default date in Llama 3.1's template.
LLAMA_RELEASE_DATE = "26 Jul 2024"
_ALTERNATING = ("gemma3",)
THINKING_TEMPLATES = ("qwen3",)
# How each template with tools lays out their JSON (phase 12).
TOOL_INDENTS = {"llama3": 4, "qwen3": None, "chatml": None}
_CALL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Texts that structure a turn in some format; if they are tokens, they are usually not special ones.
_MARKS: dict[str, tuple[str, ...]] = {"qwen3": ("<think>", "</think>", *_CALL_MARKS), "chatml": _CALL_MARKS}


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by the assistant (phase 12): its name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One turn. Raises RequestError for another role or non-string content.

    role        system, user, assistant, or tool: the result of a call of the assistant's last turn
    tool_calls  of an assistant, after the content (Llama 3 has one call and no content)
    reasoning   of an assistant: its thoughts, if they are not in the content; ignored by formats without thinking
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RequestError(f"A message has the role {self.role!r}; the roles are {', '.join(ROLES)}.")
        if not isinstance(self.content, str):
            raise RequestError(f"A message's content is {self.content!r}; it must be a string.")


def choose_template(family: str, tokenizer: Tokenizer) -> str:
    """The name of our template for a model family ("llama", "qwen3", "gemma3_text") and its tokenizer: SmolLM2 is a
    Llama model with ChatML's tokens. Raises ModelFolderError if no template fits.
    """
    for row_family, token, template in TEMPLATE_CHOICES:
        if row_family == family and tokenizer.token_id(token) is not None:
            return template
    tokens = [token for row_family, token, _ in TEMPLATE_CHOICES if row_family == family]
    lacking = f" whose tokenizer has no {' or '.join(tokens)}" if tokens else ""
    raise ModelFolderError(
        f"None of our chat templates fits a model of family {family!r}{lacking}. They are in {TEMPLATE_FOLDER}: to add "
        "one, put NAME.jinja there (its variables are messages, bos_token, add_generation_prompt) and a row in "
        "TEMPLATE_CHOICES of the chat.py beside that folder; or choose one with --chat-template; or use plain "
        "completion instead of chat."
    )


def has_tools(template: str, tokenizer: Tokenizer) -> bool:
    """Whether a template supports tools for this checkpoint: the first Llama 3 does not, 3.1 and later do."""
    has_date = template != "llama3" or llama_date(tokenizer, datetime.date.today()) is not None
    return template in TOOL_INDENTS and has_date


def render_chat(
    messages: Sequence[ChatMessage],
    *,
    template: str,
    bos_token: str = "",
    add_generation_prompt: bool = True,
    thinking: bool | None = None,
    date: str | None = None,
    default_system: bool = True,
    tools: Sequence[str] = (),
) -> str:
    """The prompt text of a conversation.

    template               a name that `choose_template` returns
    bos_token              prepended for the families that begin with one (Llama 3, Gemma 3)
    add_generation_prompt  end with the header of the assistant's next turn
    thinking               Qwen 3: False inserts an empty thinking block; None and True leave it to the model
    date                   Llama 3.1 and later: today's date in the system turn; None: the first Llama 3, without one
    default_system         ChatML: SmolLM2's own system message when the conversation has none
    tools                  the functions that may be called, each as JSON (phase 12)

    Contents appear verbatim (trimmed if the family trims). A content such as "<|im_end|>" is text here, but would
    become a control token if the result were simply tokenized: use `encode_chat`.

    Raises RequestError for an empty list, for roles that do not alternate as the family requires, and for thinking or
    tools that the template does not support; ModelFolderError for a template that does not exist.
    """
    if not (TEMPLATE_FOLDER / f"{template}.jinja").is_file():
        known = ", ".join(sorted(path.stem for path in TEMPLATE_FOLDER.glob("*.jinja")))
        raise ModelFolderError(f"There is no chat template {template!r} in {TEMPLATE_FOLDER}; there are: {known}.")
    if not messages:
        raise RequestError("The conversation has no messages (an empty list); pass at least one.")
    if thinking and template not in THINKING_TEMPLATES:
        raise RequestError(
            f"thinking=True, but the chat template {template!r} does not support thinking; leave it out."
        )
    if template in _ALTERNATING:
        _check_alternation(messages)
    _check_tools(messages, template, tools, has_date=date is not None)
    written = {"messages": list(messages), "bos_token": bos_token, "add_generation_prompt": add_generation_prompt}
    options = {"thinking": thinking, "date": date, "default_system": default_system, "tools": list(tools)}
    return _environment().get_template(f"{template}.jinja").render(written | options)


def encode_chat(tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, template: str, **options: Any) -> list[int]:
    """Token ids of a conversation: those of `chat_parts`, without added special tokens; it takes the same options."""
    parts = chat_parts(tokenizer, messages, template=template, **options)
    return [index for part in parts for index in tokenizer.encode(part, add_special_tokens=False)]


def chat_parts(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    template: str,
    add_generation_prompt: bool = True,
    thinking: bool | None = None,
    today: datetime.date | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """The prompt text of a conversation, in parts to tokenize one by one; BOS comes only from the template.

    Differences between checkpoints of one family are read from the checkpoint: whether Llama's system turn contains a
    date (see `llama_date`; `today` defaults to the clock), and whether ChatML has SmolLM2's default system message.

    A special token written out in a message ("<|im_end|>") stays text: it is split after its first character, and the
    parts are tokenized separately, so a user cannot forge a turn. The same holds for the marks of thoughts, calls and
    results ("<think>"), except those that an assistant wrote. transformers encodes both as tokens; for every other
    content the ids are the same.
    """
    described = [json.dumps(tool, ensure_ascii=False, indent=TOOL_INDENTS.get(template)) for tool in tools]
    calls = [call for message in messages for call in message.tool_calls]
    written = [*(message.content for message in messages), *described, *(call.arguments for call in calls)]
    written += [message.reasoning or "" for message in messages]
    seam = unused_character(written)
    marks = {mark for mark in _MARKS.get(template, ()) if tokenizer.token_id(mark) is not None}
    control = tokenizer.special_tokens - marks

    def cut(text: str, role: str = "user") -> str:
        return _cut(text, control if role == "assistant" else control | marks, seam)

    guarded = [
        ChatMessage(
            message.role,
            cut(message.content, message.role),
            tuple(replace(call, arguments=cut(call.arguments, message.role)) for call in message.tool_calls),
            message.reasoning and cut(message.reasoning),
        )
        for message in messages
    ]
    own = tokenizer.chat_template
    text = render_chat(
        guarded,
        template=template,
        bos_token=tokenizer.bos_token,
        add_generation_prompt=add_generation_prompt,
        thinking=thinking,
        date=llama_date(tokenizer, today or datetime.date.today()) if template == "llama3" else None,
        default_system=own is None or "named SmolLM" in own,
        tools=[cut(text) for text in described],
    )
    return text.split(seam)


def llama_date(tokenizer: Tokenizer, today: datetime.date) -> str | None:
    """The date that a Llama 3 checkpoint expects in its system turn, or None for the format without one.

    Llama 3.2's template reads the clock, 3.1's and 3.3's contain a fixed date, the first Llama 3's has none; the
    checkpoint's template shows which. Without a template, the token <|eom_id|> (3.1 and later) means the fixed date.
    """
    own = tokenizer.chat_template
    if own is None:
        return LLAMA_RELEASE_DATE if tokenizer.token_id("<|eom_id|>") is not None else None
    if "Today Date" not in own:
        return None
    return today.strftime("%d %b %Y") if "strftime_now" in own else LLAMA_RELEASE_DATE


@cache
def _environment() -> "jinja2.Environment":
    import jinja2
    import jinja2.sandbox

    loader = jinja2.FileSystemLoader(TEMPLATE_FOLDER)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    return environment


def _check_alternation(messages: Sequence[ChatMessage]) -> None:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    expected = [("user", "assistant")[index % 2] for index in range(max(1, len(turns)))]
    if turns != expected:
        raise RequestError(
            f"The roles are {', '.join(roles)}; this model's format requires user and assistant in turn, starting with "
            "user, after at most one system message."
        )


def _check_tools(messages: Sequence[ChatMessage], template: str, tools: Sequence[str], *, has_date: bool) -> None:
    calls = [len(message.tool_calls) for message in messages]
    if not (tools or any(calls) or any(message.role == "tool" for message in messages)):
        return
    if template not in TOOL_INDENTS or (template == "llama3" and not has_date):
        raise RequestError("This model's chat format has no tools; leave out tools, tool calls and their results.")
    if template == "llama3" and max(calls) > 1:
        raise RequestError(f"An assistant's turn has {max(calls)} tool calls; this model's format has one a turn.")
    turns = messages[1:] if messages[0].role == "system" else messages
    if template == "llama3" and tools and not (turns and turns[0].role == "user"):
        raise RequestError("tools stand in the first message in this format, and that is no message of the user.")


def unused_character(texts: Sequence[str]) -> str:
    """A private-use character that no text contains."""
    used = set().union(*texts)
    return next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)


def _cut(content: str, tokens: AbstractSet[str], seam: str) -> str:
    """`content`, with `seam` after the first character of each of these tokens that is written out in it."""
    present = [re.escape(token) for token in tokens if len(token) > 1 and token in content]
    return re.sub(f"(?=(?:{'|'.join(present)}))(.)", rf"\1{seam}", content, flags=re.DOTALL) if present else content
