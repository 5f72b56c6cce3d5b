"""A chat's fields for tools, as sent by OpenAI's clients. Introduced in phase 12.

Invariants: a definition reaches the chat template exactly as it was sent; a function has one definition.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator
from pydantic.functional_validators import ModelWrapValidatorHandler

from shared.server.bodies.fields import Strict, closed, short
from shared.server.errors import ApiError, invalid

MAX_TOOLS = 128
_NAME = "^[a-zA-Z0-9_-]{1,64}$"
Name = Annotated[str, Field(pattern=_NAME)]
NAMED_CHOICE = closed(type={"const": "function"}, function=closed(name={"type": "string"}))
TOOL_CHOICE_SCHEMA: dict[str, Any] = {"anyOf": [{"enum": ["none", "auto", "required", None]}, NAMED_CHOICE]}


class FunctionDefinition(Strict):
    """A function that may be called; ``parameters`` is the JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """A tool, which must be a function in this API."""

    type: Literal["function"]
    function: FunctionDefinition


def _as_sent(value: Any, validate: ModelWrapValidatorHandler[ToolDefinition]) -> Any:
    validate(value)
    return value


Tools = Annotated[list[Annotated[ToolDefinition, WrapValidator(_as_sent)]], Field(max_length=MAX_TOOLS)]


class _Lenient(BaseModel):
    """Part of a history: labels that clients add, such as ``index`` or ``parsed_arguments``, are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class CalledFunction(_Lenient):
    """The function that was called; ``arguments`` is the text of a JSON object."""

    name: Name
    arguments: str


class CalledTool(_Lenient):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def chosen_tool(value: Any) -> Any:
    """``none``, ``auto``, ``required``, or the name of a function in OpenAI's form."""
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    is_named = isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str)
    if not (is_named and value.keys() == {"type", "function"} and value["type"] == "function"):
        raise ValueError(
            f"tool_choice is {short(value)}; it must be none, auto, required, or an object such as "
            '{"type": "function", "function": {"name": "..."}}.'
        )
    return value


def check_tools(tools: Sequence[Any], choice: Any) -> None:
    """Raise ApiError for a function that is defined twice, and for a choice that the tools rule out."""
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"tools holds {names.count(name)} functions with the name {name}.", param="tools")
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise _unfit(choice, "there are no tools; add tools, or leave it out")
    if isinstance(choice, dict) and choice["function"]["name"] not in names:
        raise _unfit(choice, f"the tools are {', '.join(names)}")


def field_that_constrains(tools: Sequence[Any], choice: Any) -> str | None:
    """The field that requires valid calls, and therefore a grammar; None if no field does."""
    if choice not in (None, "none", "auto"):
        return "tool_choice"
    strict = (number for number, tool in enumerate(tools) if tool["function"].get("strict"))
    return None if choice == "none" else next((f"tools.{number}.function.strict" for number in strict), None)


def _unfit(choice: Any, told: str) -> ApiError:
    return invalid(f"tool_choice is {short(choice)}, and {told}.", param="tool_choice")
