"""The chat of a served model: what its format supports, the prompts of requests, and how their answers are read.

Introduced in phase 4. Invariants: a refusal gives the first reason, so chat as a whole comes before thinking and tools;
the grammar and the parser of an answer start in the state in which its prompt ends.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shared.errors import ModelFolderError
from shared.grammar.grammar import Grammar
from shared.server.answers.conversation import conversation
from shared.server.answers.tool_answer import ToolReading
from shared.server.answers.tool_grammar import thought_marks, tool_grammar, tool_reading
from shared.server.bodies.protocol import ChatRequest
from shared.server.bodies.structured_output import described_grammar
from shared.server.bodies.tool_fields import check_tools, field_that_constrains
from shared.server.engine.loop import EngineHandle
from shared.server.errors import invalid
from shared.server.settings import ServerConfig
from shared.text.chat import ChatMessage
from shared.text.chat_ending import ended_parts
from shared.text.chat_format import ChatFormat, chat_format
from shared.text.template_comparison import Capability
from shared.text.thoughts import MARKS, Marks, ends_in_thoughts
from shared.text.tool_format import ToolFormat


class ChatPrompt(NamedTuple):
    """The token ids of a prompt. ``is_thinking``: they end inside thoughts, which the answer continues."""

    ids: list[int]
    is_thinking: bool


class ServedChat:
    """The chat of one model. Raises ModelFolderError for a requested template that cannot be used.

    Attributes:
        format: how conversations become prompts; None: no usable chat template.
        refusals: why a capability is refused, as a sentence.
        has_thinking: whether ``enable_thinking`` may be true.
        tool_format: how calls are written; None: there are no tools.
    """

    def __init__(self, handle: EngineHandle, config: ServerConfig) -> None:
        self._tokenizer = handle.tokenizer
        self._has_grammars = handle.facts.has_grammars
        self._model_name = config.model_name
        self._is_closed = config.close_objects
        self.format: ChatFormat | None = None
        try:
            self.format = chat_format(handle.tokenizer, handle.facts.model_config.family, config.chat_template)
        except ModelFolderError:  # then there is no chat, unless a template was requested
            if config.chat_template:
                raise
        self.refusals: Mapping[Capability, str] = self.format.refusals if self.format else {}
        self.has_thinking = self.format is not None and self.format.has_thinking
        self.tool_format: ToolFormat | None = self.format.tool_format if self.format else None

    def turns(self, body: ChatRequest) -> list[ChatMessage]:
        """The conversation of a request; raises ApiError for features that the model or the engine lacks."""
        if self.format is None:
            said = f"The model {self._model_name} has no chat template here; use /v1/completions, or --chat-template."
            raise invalid(said, param="model")
        if "chat" in self.refusals:
            raise invalid(f"{self.refusals['chat']} Without a chat template, use /v1/completions.", param="model")
        thinking = body.enable_thinking
        if thinking is not None and "thinking" in self.refusals:
            raise invalid(self.refusals["thinking"], param="chat_template_kwargs.enable_thinking")
        if thinking and not self.has_thinking:
            said = (
                "enable_thinking is true; this model's chat format does not read it: leave it out or set it to false."
            )
            raise invalid(said, param="chat_template_kwargs.enable_thinking")
        self._check_tools(body)
        return conversation(body.messages)

    def _check_tools(self, body: ChatRequest) -> None:
        tools = body.definitions
        check_tools(tools, body.tool_choice)
        if not tools:
            return
        if self.tool_format is None:
            said = f"tools is given, and the chat format of {self._model_name} has no tools; leave it out."
            raise invalid(self.refusals.get("tools", said), param="tools")
        param = field_that_constrains(tools, body.tool_choice)
        if param is not None and not self._has_grammars:
            said = f"{param} asks for a call that is valid, which takes a grammar: phase 12 is the first that has them."
            raise invalid(said, param=param)

    def prompt(self, body: ChatRequest, turns: list[ChatMessage], check: Callable[[str], None]) -> ChatPrompt:
        """The prompt of a conversation, whose text is checked before it is tokenized. Raises RequestError."""
        assert self.format is not None  # `turns` has already refused it
        options = {"thinking": body.enable_thinking, "tools": body.definitions}
        parts = ended_parts(self.format.parts, turns, body.ending, **options)
        check("".join(parts))
        ids = [index for part in parts for index in self._tokenizer.encode(part, add_special_tokens=False)]
        return ChatPrompt(ids, ends_in_thoughts(ids, self._tokenizer))

    def reading(self, body: ChatRequest, prompt: ChatPrompt) -> ToolReading | None:
        """How the calls in an answer are read; None if there can be none."""
        if self.tool_format is None or not body.tools:
            return None
        has_grammar, has_format = self._has_grammars, described_grammar(body) is not None
        thought = self._thought(body, prompt, has_format=has_format)
        return tool_reading(
            body, self._tokenizer, self.tool_format, thought, has_grammar=has_grammar, has_format=has_format
        )

    def grammar(self, body: ChatRequest, prompt: ChatPrompt) -> tuple[Grammar, str] | None:
        """The grammar that a body requests, through its tools or otherwise, and the field that requests it. Raises
        ApiError."""
        described = described_grammar(body, is_closed=self._is_closed)
        if not self._has_grammars:
            return described
        thought = self._thought(body, prompt, has_format=described is not None)
        may_call = self.tool_format is not None and bool(body.tools)
        if described is None:
            return (self._tool_grammar(body, thought), "tools") if may_call else None
        if thought is None and (not may_call or body.tool_choice == "none"):
            return described
        grammar, param = described
        return self._tool_grammar(body, thought, grammar), param

    def _tool_grammar(self, body: ChatRequest, thought: Marks | None, answer: Grammar | None = None) -> Grammar:
        return tool_grammar(body, self._tokenizer, self.tool_format, thought, answer, is_closed=self._is_closed)

    def _thought(self, body: ChatRequest, prompt: ChatPrompt, *, has_format: bool) -> Marks | None:
        own = self.tool_format.thought if self.tool_format else MARKS if self.has_thinking else None
        return thought_marks(
            body, own, is_thinking=prompt.is_thinking, has_grammar=self._has_grammars, has_format=has_format
        )
