"""Renders a conversation with a chat template that is not ours: a checkpoint's own, or a file's. Introduced in phase 2.

A template that we did not write may do anything with a message's text, so it is rendered twice: with the original
texts, and with a mark after each character that may begin a control token. If the two differ in more than the marks,
the template inspects such texts, and the conversation is refused; otherwise the marks show which tokens came from the
texts.

Invariant: a control token that begins in the text of a message, a call or a tool stays text.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from shared.errors import RequestError
from shared.text.chat import ChatMessage, ToolCall, unused_character
from shared.text.template_process import TemplateProcess
from shared.text.tokenizer import Tokenizer

_MARKS = tuple(f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/"))
"""The marks of thoughts and calls that an assistant writes: templates split its past thinking at them."""
MOST_LEVELS = 256
"""Maximum levels of arguments that become an object. Deeper ones stay text, since objects are visited recursively."""


class CheckpointTemplate:
    """Renders conversations as transformers does, in the child process. In ``sources``, "tool_use" is for conversations
    with tools, and "default" for all others.
    """

    def __init__(self, tokenizer: Tokenizer, sources: Mapping[str, str], process: TemplateProcess) -> None:
        self.sources = dict(sources)
        self._process = process
        self._names = dict(tokenizer.token_names)
        marks = {text for text in _MARKS if tokenizer.token_id(text) is not None}
        self._controls = tuple(sorted(marks | {token for token in tokenizer.special_tokens if len(token) > 1}))
        firsts = "".join(re.escape(first) for first in sorted({token[0] for token in self._controls}))
        self._firsts = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._firsts_of_assistant = re.compile(f"(?!{'|'.join(_MARKS)}){self._firsts.pattern}")

    def parts(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        today: datetime.date | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[str]:
        """The prompt's text in parts to tokenize one by one, as `shared.text.chat.chat_parts` gives it. Raises
        RequestError for a conversation that the template refuses, or whose texts cannot be separated from it.
        """
        now = datetime.datetime.combine(today, datetime.time()) if today else datetime.datetime.now()
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "thinking": thinking, "now": now}
        text = self.render(messages, tools=tools, **options)
        written = _strings([_plain(messages), list(tools)])
        if not any(self._firsts.search(each) for each in written):
            return [text]
        mark = unused_character([*written, text])

        def marked(string: str, is_assistants: bool = False) -> str:
            firsts = self._firsts_of_assistant if is_assistants else self._firsts
            return firsts.sub(lambda found: found[0] + mark, string)

        shown = self.render(messages, tools=_mapped(list(tools), marked), mark=marked, **options)
        if shown.replace(mark, "") != text:
            raise RequestError(
                "A text of this conversation holds the beginning of a control token, such as '<', and the chat "
                "template does not write such a text as it is: leave out that character."
            )
        return self._divided(shown, mark)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        now: datetime.datetime,
        mark: Callable[..., str] | None = None,
    ) -> str:
        """The prompt's text; ``mark`` changes the texts of messages."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = ", ".join(sorted(self.sources))
            raise RequestError(f"The checkpoint has no chat template named {name!r}; there are: {known}.")
        variables: dict[str, Any] = {
            **self._names,
            "messages": _plain(messages, mark),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if thinking is not None:
            variables["enable_thinking"] = thinking
        return self._process.render(self.sources[name], variables, now)

    def _divided(self, shown: str, mark: str) -> list[str]:
        """The marked text, divided where a mark is inside a control token."""
        pieces = shown.split(mark)
        text, parts = "".join(pieces), [pieces[0]]
        end = len(pieces[0])
        for piece in pieces[1:]:
            if text.startswith(self._controls, end - 1):
                parts.append(piece)
            else:
                parts[-1] += piece
            end += len(piece)
        return parts


def _plain(messages: Sequence[ChatMessage], mark: Callable[..., str] | None = None) -> list[dict[str, Any]]:
    """The messages in the form that templates expect; calls get ids of nine letters, which Mistral's templates
    require."""
    mark = mark or (lambda text, *_: text)
    turns: list[dict[str, Any]] = []
    num_calls = 0
    open_calls: list[tuple[str, str]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": mark(message.content, message.role == "assistant")}
        if message.role == "tool" and open_calls:
            turn["tool_call_id"], turn["name"] = open_calls.pop(0)
        elif message.role == "assistant":
            if message.reasoning is not None:
                turn["reasoning_content"] = mark(message.reasoning)
            ids = [f"call{num_calls + index:05}" for index in range(len(message.tool_calls))]
            num_calls += len(ids)
            open_calls = [(each, call.name) for each, call in zip(ids, message.tool_calls, strict=True)]
            if ids:
                turn["tool_calls"] = [
                    {"id": each, "type": "function", "function": _function(call, mark)}
                    for each, call in zip(ids, message.tool_calls, strict=True)
                ]
        turns.append(turn)
    return turns


def _function(call: ToolCall, mark: Callable[..., str]) -> dict[str, Any]:
    """A call whose arguments are the object that templates expect; truncated or very deep arguments stay text."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = call.arguments
    value = call.arguments if _is_deep(value) else value
    return {"name": call.name, "arguments": _mapped(value, lambda each: mark(each, True))}


def _is_deep(value: Any) -> bool:
    """Whether a JSON value has more than MOST_LEVELS levels of objects and lists."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inner:
            return False
        level = list(chain.from_iterable(inner))
    return True


def _mapped(value: Any, change: Callable[..., str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value


def _strings(value: Any) -> list[str]:
    """All strings in a JSON value, including keys."""
    if isinstance(value, str):
        return [value]
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _strings(part)]
