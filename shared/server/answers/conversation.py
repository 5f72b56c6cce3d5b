"""The messages of a request as turns of a conversation: tool calls, and the results that belong to them.

Chat templates write no call ids: a model matches results to calls by their order. Introduced in phase 12. Invariants:
results that follow a turn with calls are in the order of these calls; a call that this server produced is accepted
unchanged.
"""

from collections.abc import Sequence

from shared.server.bodies.fields import short
from shared.server.bodies.message import Message
from shared.server.errors import invalid
from shared.text.chat import ChatMessage, ToolCall


def conversation(messages: Sequence[Message]) -> list[ChatMessage]:
    """The turns. Raises ApiError for arguments that are not the beginning of a JSON object, and for a result without
    its call."""
    turns: list[ChatMessage] = []
    results: dict[int, ChatMessage] = {}  # calls of the last turn, by the call's index
    indices: dict[str, int] = {}
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        if message.role == "tool":
            index = indices.get(message.tool_call_id or "")
            if index is None or index in results:
                problem = "no call of the last assistant message has this id" if index is None else "it has a result"
                said = f"tool_call_id is {short(message.tool_call_id)}; {problem}."
                raise invalid(said, param=f"{where}.tool_call_id")
            results[index] = ChatMessage("tool", message.text)
            continue
        turns += [results[index] for index in sorted(results)]
        calls = message.tool_calls or []
        results, indices = {}, {call.id: index for index, call in enumerate(calls)}
        called = tuple(
            ToolCall(call.function.name, _arguments(call.function.arguments, f"{where}.tool_calls.{index}"))
            for index, call in enumerate(calls)
        )
        turns.append(ChatMessage(message.role, message.text, called, message.thoughts))
    return [*turns, *(results[index] for index in sorted(results))]


def _arguments(text: str, call: str) -> str:
    """An object's text, a prefix of one (as ``max_tokens`` may leave it), or {} if there are no arguments."""
    begun = text.lstrip()
    if begun and not begun.startswith("{"):
        said = f"arguments is {short(text)}; it must be the text of a JSON object, or the beginning of one."
        raise invalid(said, param=f"{call}.function.arguments")
    return text if begun else "{}"
