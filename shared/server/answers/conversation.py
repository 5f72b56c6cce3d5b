"""The messages of a request as turns of a conversation: calls of tools, and the results that belong to them.

Chat templates write no ids of calls: a model knows results by their order. Introduced in phase 12. Invariants: results
that follow a turn with calls stand in the order of these calls; a call that this server gave is accepted as it came.
"""

from collections.abc import Sequence

from shared.server.bodies.fields import short
from shared.server.bodies.message import Message
from shared.server.errors import invalid
from shared.text.chat import ChatMessage, ToolCall


def conversation(messages: Sequence[Message]) -> list[ChatMessage]:
    """The turns. Raises ApiError for arguments that begin no JSON object, and a result without its call."""
    turns: list[ChatMessage] = []
    results: dict[int, ChatMessage] = {}  # of the last calls, by the place of the call
    places: dict[str, int] = {}
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        if message.role == "tool":
            place = places.get(message.tool_call_id or "")
            if place is None or place in results:
                problem = "no call of the last assistant message has this id" if place is None else "it has a result"
                said = f"tool_call_id is {short(message.tool_call_id)}; {problem}."
                raise invalid(said, param=f"{where}.tool_call_id")
            results[place] = ChatMessage("tool", message.text)
            continue
        turns += [results[place] for place in sorted(results)]
        calls = message.tool_calls or []
        results, places = {}, {call.id: place for place, call in enumerate(calls)}
        called = tuple(
            ToolCall(call.function.name, _arguments(call.function.arguments, f"{where}.tool_calls.{place}"))
            for place, call in enumerate(calls)
        )
        turns.append(ChatMessage(message.role, message.text, called, message.thoughts))
    return [*turns, *(results[place] for place in sorted(results))]


def _arguments(text: str, call: str) -> str:
    """An object's text, the beginning of one, as ``max_tokens`` may leave it, or {} where there are none."""
    begun = text.lstrip()
    if begun and not begun.startswith("{"):
        said = f"arguments is {short(text)}; it must be the text of a JSON object, or the beginning of one."
        raise invalid(said, param=f"{call}.function.arguments")
    return text if begun else "{}"
