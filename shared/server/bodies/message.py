"""One message of a chat, as OpenAI's clients send it. Introduced in phase 4; tool calls and results in phase 12.

Invariant: its JSON schema allows exactly what is accepted, role by role.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema, field_validator, model_validator

from shared.server.bodies.fields import MESSAGE_CONTENT_SCHEMA, Only, message_text, short
from shared.server.bodies.tool_fields import CalledTool

_NO_CALLS = {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}
_SOME_CALLS = {"type": "array", "minItems": 1}
_TEXT_CONTENT = {"type": ["string", "array"]}
_ROLES: list[dict[str, Any]] = [
    {
        "properties": {
            "role": {"enum": ["system", "developer", "user"]},
            "content": _TEXT_CONTENT,
            "tool_calls": _NO_CALLS,
            "tool_call_id": {"type": "null"},
        },
        "required": ["content"],
    },
    {"properties": {"role": {"const": "assistant"}, "tool_call_id": {"type": "null"}}, "required": ["content"]},
    {
        "properties": {"role": {"const": "assistant"}, "tool_calls": _SOME_CALLS, "tool_call_id": {"type": "null"}},
        "required": ["tool_calls"],
    },
    {
        "properties": {
            "role": {"const": "tool"},
            "content": _TEXT_CONTENT,
            "tool_calls": _NO_CALLS,
            "tool_call_id": {"type": "string"},
        },
        "required": ["content", "tool_call_id"],
    },
]
"""What each role has."""


def _describe_roles(schema: dict[str, Any]) -> None:
    schema["required"] = ["role"]
    schema["anyOf"] = _ROLES


class Message(BaseModel):
    """One message of a conversation; this server's answers are valid unchanged.

    All other fields are labels and are ignored: clients add them to their histories. Content never is.
    """

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=_describe_roles)

    role: Annotated[str, WithJsonSchema({"enum": ["system", "developer", "user", "assistant", "tool"]})]
    content: Annotated[Any, AfterValidator(message_text), WithJsonSchema(MESSAGE_CONTENT_SCHEMA)]
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # an assistant's text if it has no content
    reasoning_content: str | None = None  # an assistant's thoughts, under vLLM's older and newer names
    reasoning: str | None = None

    audio: Annotated[Any, Only(None)] = None
    images: Annotated[Any, Only([], None)] = None
    files: Annotated[Any, Only([], None)] = None
    attachments: Annotated[Any, Only([], None)] = None
    function_call: Annotated[Any, Only(None)] = None

    @field_validator("role")
    @classmethod
    def _is_role(cls, value: str) -> str:
        """``developer`` is OpenAI's newer name for the role ``system``."""
        if value not in ("system", "developer", "user", "assistant", "tool"):
            raise ValueError(f"role is {short(value)}; the roles are system, user, assistant and tool.")
        return "system" if value == "developer" else value

    @model_validator(mode="before")
    @classmethod
    def _may_only_call(cls, value: Any) -> Any:
        """Calls need no content next to them."""
        has_calls = isinstance(value, dict) and bool(value.get("tool_calls"))
        return {"content": None, **value} if has_calls else value

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls is given with the role {self.role}; only an assistant calls tools.")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError(
                f"tool_call_id is {short(self.tool_call_id)} with the role {self.role}; the role tool needs it, and no "
                "other has it."
            )
        if self.content is None and self.role != "assistant":
            raise ValueError("content is None; it must be a text or a list of parts of type text.")
        return self

    @property
    def text(self) -> str:
        return self.content or self.refusal or ""

    @property
    def thoughts(self) -> str | None:
        """An assistant's thoughts, if they are not in the text."""
        if self.role != "assistant":
            return None
        return self.reasoning if self.reasoning_content is None else self.reasoning_content
