"""Checks whether one of our chat templates gives the same prompts as a checkpoint's. Introduced in phase 2.

Both render the same few conversations, the probes, on the same date. They are compared separately for plain chat, tools
and thinking, because a checkpoint may agree with ours in one and not in another.

Invariant: a template agrees in a capability only if every probe of that capability gives the same text, or is refused
by both.
"""

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.errors import RequestError
from shared.text.chat import THINKING_TEMPLATES, ChatMessage, ToolCall, chat_parts, has_tools
from shared.text.checkpoint_template import CheckpointTemplate
from shared.text.template_process import TemplateBoundError
from shared.text.tokenizer import Tokenizer
from shared.text.tool_format import TOOL_FORMATS, ToolFormat

Capability = Literal["chat", "tools", "thinking"]
DATE = datetime.date(2025, 3, 9)

KNOWN_TEMPLATES = {"4731086e35976d3b": "chatml"}
"""Checkpoints' templates that a test compares (SmolLM2-135M-Instruct's), so that a start-up need not: our template, by
the `digest_of` theirs."""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "a < b", "parameters": {"type": "object", "properties": {}}},
}
_CALL = ToolCall("add", '{"a": 1, "b": "<é>"}')
_SYSTEM = ChatMessage("system", "Be brief & exact.")
_USER = ChatMessage("user", ' Is 1 < 2?\nSay "é". ')
_ANSWER = ChatMessage("assistant", "Yes.")
_MORE = ChatMessage("user", "More?")
_THOUGHT = ChatMessage("assistant", "<think>\nhm\n</think>\n\nYes.")
_CALLS = ChatMessage("assistant", "", (_CALL,))
_BOTH = ChatMessage("assistant", "I add.", (_CALL, _CALL))
_RESULT = ChatMessage("tool", '{"sum": "é"}')


@dataclass(frozen=True, eq=False)
class Probe:
    """A conversation. ``described`` is a phrase for messages; ``options`` are those of `chat_parts`."""

    capability: Capability
    described: str
    messages: tuple[ChatMessage, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


_QUESTION = Probe("chat", "a question", (_USER,))
_QUESTION_WITH_TOOL = Probe("tools", "a question with a tool", (_USER,), {"tools": [_TOOL]})
_ONE_CALL = Probe("tools", "a call and its result", (_SYSTEM, _USER, _CALLS, _RESULT), {"tools": [_TOOL]})
_SEVERAL_CALLS = Probe("tools", "two calls", (_USER, _BOTH, _RESULT, _RESULT), {"tools": [_TOOL]})
_THINKING_ON = Probe("thinking", "enable_thinking: true", (_USER,), {"thinking": True})
_THINKING_OFF = Probe("thinking", "enable_thinking: false", (_USER,), {"thinking": False})
PROBES = (
    _QUESTION,
    Probe("chat", "a conversation with a system message", (_SYSTEM, _USER, _ANSWER, _MORE)),
    Probe("chat", "an answer that ends the conversation", (_USER, _ANSWER), {"add_generation_prompt": False}),
    _QUESTION_WITH_TOOL,
    _ONE_CALL,
    Probe("tools", "an answer after a call", (_USER, _CALLS, _RESULT, _ANSWER, _MORE), {"tools": [_TOOL]}),
    _SEVERAL_CALLS,
    _THINKING_ON,
    _THINKING_OFF,
    Probe("thinking", "an earlier answer with its thinking", (_USER, _THOUGHT, _MORE)),
)


@dataclass(frozen=True)
class Outcome:
    """A template's result for a probe: the prompt, or the sentence with which it refuses the probe."""

    text: str
    is_prompt: bool


class ProbedTemplate:
    """A checkpoint's template with its result for each probe. A probe that exceeded a limit is not tried again."""

    def __init__(self, theirs: CheckpointTemplate) -> None:
        now = datetime.datetime.combine(DATE, datetime.time())
        self._outcomes: dict[Probe, Outcome] = {}
        ended: Outcome | None = None
        for probe in PROBES:
            try:
                outcome = ended or Outcome(theirs.render(probe.messages, now=now, **probe.options), True)
            except TemplateBoundError as error:
                outcome = ended = Outcome(str(error), False)
            except RequestError as error:
                outcome = Outcome(str(error), False)
            self._outcomes[probe] = outcome

    @property
    def error(self) -> str | None:
        """Why the template gives no prompt for a plain question; None: it gives one."""
        outcome = self._outcomes[_QUESTION]
        return None if outcome.is_prompt else outcome.text

    @property
    def reads_tools(self) -> bool:
        """Whether it writes anything about a conversation's tools."""
        return self._outcomes[_QUESTION_WITH_TOOL] != self._outcomes[_QUESTION]

    @property
    def reads_thinking(self) -> bool:
        """Whether ``enable_thinking`` changes the prompt."""
        return self._outcomes[_THINKING_ON] != self._outcomes[_THINKING_OFF]

    @property
    def call_format(self) -> ToolFormat | None:
        """How the template writes calls; None without tools, or if this engine does not read calls of that form."""
        outcome = self._outcomes[_ONE_CALL]
        if not (self.reads_tools and outcome.is_prompt):
            return None
        for template in ("qwen3", "llama3") if self.reads_thinking else ("chatml", "llama3"):
            form = TOOL_FORMATS[template]
            line = "\n" if form.opening else ""
            call = f'{{"name": "{_CALL.name}", "{form.arguments_key}": {_CALL.arguments}}}'
            if form.opening + line + call + line + form.closing in outcome.text:
                return form
        return None

    def differences(self, tokenizer: Tokenizer, template: str) -> dict[Capability, str]:
        """The first difference between the template and ours of this name, by capability. A template without tools does
        not show how calls are written, so ours decides.
        """
        left_out: set[Probe] = set() if template in THINKING_TEMPLATES else {_THINKING_ON}
        if template in TOOL_FORMATS and not TOOL_FORMATS[template].has_several:
            left_out.add(_SEVERAL_CALLS)
        found: dict[Capability, str] = {}
        if self.reads_tools and not has_tools(template, tokenizer):
            found["tools"] = f"builtin:{template} has none"
        for probe in PROBES:
            is_compared = self.reads_tools or probe.capability != "tools"
            if probe.capability in found or probe in left_out or not is_compared:
                continue
            difference = _difference(probe, _ours(probe, tokenizer, template), self._outcomes[probe], template)
            if difference is not None:
                found[probe.capability] = difference
        return found


def digest_of(sources: Mapping[str, str]) -> str:
    """A name for a checkpoint's templates: the first 16 digits of their SHA-256."""
    return hashlib.sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()[:16]


def _ours(probe: Probe, tokenizer: Tokenizer, template: str) -> Outcome:
    render: Callable[..., list[str]] = chat_parts
    try:
        parts = render(tokenizer, probe.messages, template=template, today=DATE, **probe.options)
    except RequestError as error:
        return Outcome(str(error), False)
    return Outcome("".join(parts), True)


def _difference(probe: Probe, ours: Outcome, theirs: Outcome, template: str) -> str | None:
    own = f"builtin:{template}"
    if not theirs.is_prompt and ours.is_prompt:
        return f"for {probe.described} the checkpoint's gives no prompt. {theirs.text.rstrip('.')}"
    if theirs.is_prompt and not ours.is_prompt:
        return f"for {probe.described} {own} gives no prompt. {ours.text.rstrip('.')}"
    if not theirs.is_prompt or theirs.text == ours.text:
        return None
    shorter = min(len(ours.text), len(theirs.text))
    at = next((index for index in range(shorter) if ours.text[index] != theirs.text[index]), shorter)
    return (
        f"for {probe.described}, at character {at}, the checkpoint's has {_shown(theirs.text, at)} and {own} has "
        f"{_shown(ours.text, at)}"
    )


def _shown(text: str, at: int) -> str:
    return repr(text[at : at + 40]) if at < len(text) else "its end"
