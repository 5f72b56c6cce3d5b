"""Which chat template renders a model's conversations, chosen when the model is loaded. Introduced in phase 2.

Our own templates are used if they give the same prompts as the checkpoint's. If none does, the capability that differs
is refused, with the first difference, rather than answered from a prompt that the model was not trained on. A setting
can override this: ``builtin:NAME``, ``checkpoint``, or a file.

Invariant: without that setting, a prompt equals the one of the checkpoint's template on every probe of its capability.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, ModelFolderError, RequestError
from shared.text.chat import (
    TEMPLATE_CHOICES,
    TEMPLATE_FOLDER,
    THINKING_TEMPLATES,
    ChatMessage,
    chat_parts,
    choose_template,
    has_tools,
)
from shared.text.checkpoint_template import CheckpointTemplate
from shared.text.template_comparison import KNOWN_TEMPLATES, Capability, ProbedTemplate, digest_of
from shared.text.template_process import TemplateProcess
from shared.text.tokenizer import Tokenizer
from shared.text.tool_format import TOOL_FORMATS, ToolFormat

BUILTIN, CHECKPOINT = "builtin:", "checkpoint"
NAMES = tuple(dict.fromkeys(template for _, _, template in TEMPLATE_CHOICES))


@dataclass(frozen=True)
class ChatFormat:
    """How the conversations of one model become prompts.

    name          "builtin:NAME", "checkpoint", or the name of a file; None: chat is refused
    tool_format   how calls are written; None: there are no tools
    has_thinking  whether ``enable_thinking`` may be true
    refusals      why a capability is refused, as a sentence
    """

    name: str | None
    tokenizer: Tokenizer
    tool_format: ToolFormat | None = None
    has_thinking: bool = False
    refusals: Mapping[Capability, str] = field(default_factory=dict)
    render: Callable[..., list[str]] | None = None

    def parts(
        self,
        messages: Sequence[ChatMessage],
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> list[str]:
        """The prompt's text in parts to tokenize one by one; `shared.text.chat.chat_parts` has the options. Raises
        RequestError for a conversation that needs a refused capability.
        """
        has_calls = bool(tools) or any(message.tool_calls or message.role == "tool" for message in messages)
        answers = [message for message in messages if message.role == "assistant"]
        has_thought = any(message.reasoning or "</think>" in message.content for message in answers)
        needed = {"chat": True, "tools": has_calls, "thinking": thinking is not None or has_thought}
        for capability, reason in self.refusals.items():
            if needed[capability]:
                raise RequestError(reason)
        assert self.render is not None  # otherwise chat would be refused
        return self.render(messages, thinking=thinking, tools=tools, **options)

    def encode(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """The token ids of `parts`, without special tokens added."""
        parts = self.parts(messages, **options)
        return [index for part in parts for index in self.tokenizer.encode(part, add_special_tokens=False)]


def checked_setting(setting: str) -> str:
    """The setting, with a file as its absolute path. Raises ConfigError if it names no template, whatever the model."""
    if setting == CHECKPOINT:
        return setting
    if setting.startswith(BUILTIN):
        if setting.removeprefix(BUILTIN) not in NAMES:
            known = ", ".join(BUILTIN + name for name in NAMES)
            raise ConfigError(f"--chat-template is {setting!r}; our templates are {known}, in {TEMPLATE_FOLDER}.")
        return setting
    path = Path(setting).expanduser().resolve()
    if not path.is_file():
        known = f"a file, {CHECKPOINT}, or {BUILTIN}NAME"
        raise ConfigError(f"--chat-template is {setting!r}, which is no file; it must be {known}.")
    return str(path)


def chat_format(tokenizer: Tokenizer, family: str, setting: str | None = None) -> ChatFormat:
    """A model's format, according to the setting ``--chat-template`` if it is given.

    Raises ConfigError for a setting that names no template. Raises ModelFolderError for a checkpoint that has no
    template and that none of ours fits, or whose requested template cannot be rendered.
    """
    if setting is None:
        return _agreeing(tokenizer, family)
    setting = checked_setting(setting)
    if setting.startswith(BUILTIN):
        return _builtin(tokenizer, setting.removeprefix(BUILTIN))
    if setting == CHECKPOINT:
        if not tokenizer.chat_templates:
            raise ModelFolderError("--chat-template is checkpoint, and this checkpoint has no chat template.")
        return _rendered(tokenizer, tokenizer.chat_templates, CHECKPOINT)
    path = Path(setting)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} cannot be read: {error}.") from None
    return _rendered(tokenizer, {"default": source}, path.name)


def _agreeing(tokenizer: Tokenizer, family: str) -> ChatFormat:
    """Our template that agrees with the checkpoint's, in everything or at least in plain chat."""
    sources = tokenizer.chat_templates
    if not sources:
        return _builtin(tokenizer, choose_template(family, tokenizer))
    if (known := KNOWN_TEMPLATES.get(digest_of(sources))) is not None:
        return _builtin(tokenizer, known)
    process = TemplateProcess()
    try:
        probed = ProbedTemplate(CheckpointTemplate(tokenizer, sources, process))
    finally:
        process.close()
    names = list(NAMES)
    with suppress(ModelFolderError):  # a template may equal one of ours whose tokens the tokenizer does not have
        names.insert(0, choose_template(family, tokenizer))
    refusals: dict[str, dict[Capability, str]] = {}
    for template in dict.fromkeys(names):
        found = probed.differences(tokenizer, template)
        if not found:
            return _builtin(tokenizer, template)
        refusals[template] = {capability: _reason(capability, said) for capability, said in found.items()}
    for template, reasons in refusals.items():
        if "chat" not in reasons:
            return _builtin(tokenizer, template, reasons)
    return ChatFormat(None, tokenizer, refusals={"chat": refusals[names[0]]["chat"]})


def _reason(capability: Capability, difference: str) -> str:
    return (
        f"None of our chat templates equals the checkpoint's own in {capability}: {difference}. To decide between "
        f"them, start with --chat-template {CHECKPOINT}, FILE, or {BUILTIN}NAME ({', '.join(NAMES)})."
    )


def _builtin(tokenizer: Tokenizer, template: str, refusals: Mapping[Capability, str] | None = None) -> ChatFormat:
    refusals = refusals or {}
    may_call = "tools" not in refusals and has_tools(template, tokenizer)
    return ChatFormat(
        BUILTIN + template,
        tokenizer,
        TOOL_FORMATS[template] if may_call else None,
        template in THINKING_TEMPLATES and "thinking" not in refusals,
        refusals,
        partial(chat_parts, tokenizer, template=template),
    )


def _rendered(tokenizer: Tokenizer, sources: Mapping[str, str], name: str) -> ChatFormat:
    theirs = CheckpointTemplate(tokenizer, sources, TemplateProcess())
    probed = ProbedTemplate(theirs)
    if probed.error is not None:
        raise ModelFolderError(f"--chat-template is {name}, which gives no prompt for a question. {probed.error}")
    refusals: dict[Capability, str] = {}
    if probed.call_format is None:
        refusals["tools"] = (
            f"The chat template ({name}) has no tools, or writes calls in a form that this engine does not read; leave "
            "out tools, tool calls and their results."
        )
    return ChatFormat(name, tokenizer, probed.call_format, probed.reads_thinking, refusals, theirs.parts)
