"""How chat formats write function calls. Introduced in phase 12.

The parser of answers (`shared.text.tools`) and the grammar of answers both read this table. Invariant: a grammar spells
a call as ``opening``, ``head``, name, ``middle``, arguments, a brace and ``closing``; the parser reads this as a call.
"""

from dataclasses import dataclass

from shared.text.thoughts import MARKS, Marks


@dataclass(frozen=True)
class ToolFormat:
    """How a chat template writes calls: objects with a name and arguments.

    Attributes:
        opening: opens a call; "" if a call is the whole answer, which its brace opens.
        closing: closes a call.
        arguments_key: the key of the arguments.
        has_several: whether an answer may hold several calls.
        thought: opens and closes the model's thinking, in which nothing is a call; None: no thinking. The opening is ""
            if the prompt contains it.
        hidden_token: a special token that may precede a call.
        head, middle: how a grammar spells the text before a name, and between it and the arguments.
    """

    opening: str
    closing: str
    arguments_key: str
    has_several: bool
    thought: Marks | None = None
    hidden_token: str | None = None

    @property
    def head(self) -> str:
        return ("\n" if self.opening else "") + '{"name": "'

    @property
    def middle(self) -> str:
        return f'", "{self.arguments_key}": '


TOOL_FORMATS = {
    "llama3": ToolFormat("", "", "parameters", has_several=False, hidden_token="<|python_tag|>"),
    "qwen3": ToolFormat("<tool_call>", "</tool_call>", "arguments", has_several=True, thought=MARKS),
    "chatml": ToolFormat("<tool_call>", "</tool_call>", "arguments", has_several=True),
}
"""Formats, by the name of the chat template."""
