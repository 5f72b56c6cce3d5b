"""Request bodies, as OpenAI's and compatible clients send them. Introduced in phase 4.

There are three kinds of fields: those that have an effect; those that clients send with a value without effect, such as
``n: 1``, which are accepted with that value only; and notes of the client (``user``), which are accepted and ignored.
Any other field is refused by name. Invariant: ``SamplingParams`` validates the sampling fields, so an invalid value
gives the same message here, on the command line and in Python.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from shared.sampling.params import MAX_LOGPROBS, SamplingParams
from shared.server.fields import (
    CONTENT_SCHEMA,
    PROMPT_SCHEMA,
    STOP_SCHEMA,
    Only,
    content_text,
    one_prompt,
    short,
    stop_texts,
)


class StreamOptions(BaseModel):
    """``include_usage`` adds a chunk with the usage at the end of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, Only(False, None)] = None
    include_obfuscation: bool | None = None


class SamplingFields(BaseModel):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str = Field(max_length=1024)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: Annotated[Any, AfterValidator(stop_texts), WithJsonSchema(STOP_SCHEMA)] = ()
    seed: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[Any, Only(1, None)] = None
    presence_penalty: Annotated[Any, Only(0, None)] = None
    frequency_penalty: Annotated[Any, Only(0, None)] = None
    logit_bias: Annotated[Any, Only({}, None)] = None
    min_p: Annotated[Any, Only(0, None)] = None
    min_tokens: Annotated[Any, Only(0, None)] = None
    length_penalty: Annotated[Any, Only(1, None)] = None
    use_beam_search: Annotated[Any, Only(False, None)] = None
    stop_token_ids: Annotated[Any, Only([], None)] = None
    include_stop_str_in_output: Annotated[Any, Only(False, None)] = None
    skip_special_tokens: Annotated[Any, Only(True, None)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True, None)] = None
    priority: Annotated[Any, Only(0, None)] = None
    store: Annotated[Any, Only(False, None)] = None
    service_tier: Annotated[Any, Only("auto", "default", None)] = None

    user: str | None = None
    metadata: dict[str, Any] | None = None

    @field_validator("temperature", "top_p", "repetition_penalty", "seed", "ignore_eos")
    @classmethod
    def _is_samplable(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            assert info.field_name is not None
            SamplingParams(**{info.field_name: value})
        return value

    @field_validator("top_k")
    @classmethod
    def _is_top_k(cls, value: int | None) -> int | None:
        """Some clients send 0 or -1 for no limit."""
        value = None if value in (0, -1) else value
        SamplingParams(top_k=value)
        return value

    @field_validator("max_tokens", "max_completion_tokens", check_fields=False)
    @classmethod
    def _is_positive(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"{info.field_name} is {value}; it must be at least 1.")
        return value

    def sampling_params(self, max_new_tokens: int, logprobs: int | None) -> SamplingParams:
        """The sampling parameters; absent fields have OpenAI's defaults, which are also those of ``SamplingParams``."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "ignore_eos")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(**given, max_new_tokens=max_new_tokens, stop=self.stop, logprobs=logprobs)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingFields):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[Any, AfterValidator(one_prompt), WithJsonSchema(PROMPT_SCHEMA)]
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    best_of: Annotated[Any, Only(1, None)] = None
    echo: Annotated[Any, Only(False, None)] = None
    suffix: Annotated[Any, Only("", None)] = None
    add_special_tokens: Annotated[Any, Only(True, None)] = None


class Message(BaseModel):
    """One message of a conversation; an answer of this server is valid as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, WithJsonSchema({"enum": ["system", "developer", "user", "assistant"]})]
    content: Annotated[Any, AfterValidator(content_text), WithJsonSchema(CONTENT_SCHEMA)]

    name: Annotated[Any, Only(None)] = None
    refusal: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only([], None)] = None
    audio: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None)] = None
    tool_calls: Annotated[Any, Only([], None)] = None

    @field_validator("role")
    @classmethod
    def _is_role(cls, value: str) -> str:
        """``developer`` is OpenAI's newer name for the role ``system``."""
        if value not in ("system", "developer", "user", "assistant"):
            raise ValueError(f"role is {short(value)}; the roles are system, user and assistant.")
        return "system" if value == "developer" else value


class TemplateOptions(BaseModel):
    """``enable_thinking``: whether the model may think first (Qwen 3)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = None


class ResponseFormat(BaseModel):
    """The format of the answer; formats other than text arrive in phase 12."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Annotated[Any, Only("text")]


class ChatRequest(SamplingFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    chat_template_kwargs: TemplateOptions | None = None

    response_format: ResponseFormat | None = None
    tools: Annotated[Any, Only([], None)] = None
    tool_choice: Annotated[Any, Only("none", "auto", None)] = None
    functions: Annotated[Any, Only([], None)] = None
    function_call: Annotated[Any, Only("none", "auto", None)] = None
    modalities: Annotated[Any, Only(["text"], None)] = None
    audio: Annotated[Any, Only(None)] = None
    prediction: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None)] = None
    verbosity: Annotated[Any, Only(None)] = None
    web_search_options: Annotated[Any, Only(None)] = None

    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("top_logprobs is set and logprobs is not; set logprobs to true too.")
        return value
