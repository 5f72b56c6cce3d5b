"""Request bodies, as OpenAI's and compatible clients send them. Introduced in phase 4.

There are three kinds of fields: those that have an effect; those that clients send with a value without effect, such as
``suffix: ""``, which are accepted with that value only; and the client's notes (``user``), which are accepted and
ignored. Any other field is refused by name. Invariants: ``SamplingParams`` validates the sampling fields, so an invalid
value gives the same message here, on the command line and in Python; a field's JSON schema allows what is accepted.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from shared.sampling.params import MAX_LOGPROBS, MAX_PENALTY, MAX_SEED, SamplingParams
from shared.server.bodies.fields import (
    CACHE_SALT_SCHEMA,
    CONTENT_SCHEMA,
    LOGIT_BIAS_SCHEMA,
    PROMPTS_SCHEMA,
    STOP_IDS_SCHEMA,
    STOP_SCHEMA,
    Only,
    Strict,
    Whole,
    content_text,
    optional,
    prompt_list,
    stop_texts,
    token_biases,
    whole,
)
from shared.server.bodies.message import Message
from shared.server.bodies.segment_fields import FieldOfSegments, FormerFieldOfSegments
from shared.server.bodies.structured_output import GUIDED_SCHEMAS, RESPONSE_FORMAT_SCHEMA, STRUCTURED_OUTPUTS_SCHEMA
from shared.server.bodies.tool_fields import TOOL_CHOICE_SCHEMA, Tools, chosen_tool
from shared.server.errors import invalid
from shared.server.settings import MAX_N
from shared.text.chat_ending import Ending

_MAX_FLOAT = 1.7976931348623157e308  # a larger number in JSON becomes infinite
_SET_OTHERWISE = (
    "max_new_tokens",
    "min_tokens",
    "stop",
    "logprobs",
    "prompt_logprobs",
    "prediction_ids",
    "structured_output",
)
"""Fields that a body has under another name or form, or not at all."""
_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in _SET_OTHERWISE)
"""The fields that a body has unchanged."""


class StreamOptions(Strict):
    """``include_usage`` adds a chunk with the usage at the end of a stream, and with ``continuous_usage_stats`` the
    usage so far to every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(BaseModel):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    prompt_field: ClassVar[str]

    model: str = Field(max_length=1024)
    n: Annotated[int | None, Field(ge=1, le=MAX_N), BeforeValidator(whole)] = None
    temperature: Annotated[float | None, optional("number", minimum=0, maximum=_MAX_FLOAT)] = None
    top_p: Annotated[float | None, optional("number", exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[Whole | None, optional("integer", minimum=-1)] = None
    min_p: Annotated[float | None, optional("number", minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[float | None, optional("number", exclusiveMinimum=0, maximum=_MAX_FLOAT)] = None
    presence_penalty: Annotated[float | None, optional("number", minimum=-MAX_PENALTY, maximum=MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, optional("number", minimum=-MAX_PENALTY, maximum=MAX_PENALTY)] = None
    logit_bias: Annotated[Any, AfterValidator(token_biases), WithJsonSchema(LOGIT_BIAS_SCHEMA)] = None
    min_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(whole)] = None
    stop: Annotated[Any, AfterValidator(stop_texts), WithJsonSchema(STOP_SCHEMA)] = ()
    stop_token_ids: Annotated[list[Whole] | None, WithJsonSchema(STOP_IDS_SCHEMA)] = None
    seed: Annotated[Whole | None, optional("integer", minimum=0, maximum=MAX_SEED)] = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[Any, WithJsonSchema(CACHE_SALT_SCHEMA)] = None
    use_speculative_decoding: bool | None = None
    thinking_budget: Annotated[Whole | None, optional("integer", minimum=0)] = None
    min_thinking_tokens: Annotated[Whole | None, optional("integer", minimum=0)] = None
    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT_SCHEMA)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(STRUCTURED_OUTPUTS_SCHEMA)] = None
    guided_json: Annotated[Any, WithJsonSchema(GUIDED_SCHEMAS["guided_json"])] = None
    guided_regex: Annotated[Any, WithJsonSchema(GUIDED_SCHEMAS["guided_regex"])] = None
    guided_choice: Annotated[Any, WithJsonSchema(GUIDED_SCHEMAS["guided_choice"])] = None
    grammar_progress: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    length_penalty: Annotated[Any, Only(1, None)] = None
    use_beam_search: Annotated[Any, Only(False, None)] = None
    include_stop_str_in_output: Annotated[Any, Only(False, None)] = None
    skip_special_tokens: Annotated[Any, Only(True, None)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True, None)] = None
    priority: Annotated[Any, Only(0, None)] = None
    store: Annotated[Any, Only(False, None)] = None
    service_tier: Annotated[Any, Only("auto", "default", None)] = None

    user: str | None = None
    metadata: dict[str, Any] | None = None

    @field_validator(*_SAMPLING)
    @classmethod
    def _is_samplable(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if info.field_name == "top_k" and value in (0, -1):  # some clients write no limit this way
            return 0
        if value is not None:
            SamplingParams(**{info.field_name: value})
        return value

    def sampling_params(
        self,
        max_new_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> SamplingParams:
        """The sampling parameters; absent fields take ``defaults``, or else OpenAI's defaults, which are those of
        ``SamplingParams``.

        ``min_tokens`` is capped at the longest answer, ``min_thinking_tokens`` at the thinking budget.
        """
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        given = {**defaults, **given}
        if given.get("top_k") == 0:
            del given["top_k"]
        if self.thinking_budget is not None:
            given["min_thinking_tokens"] = min(self.min_thinking_tokens or 0, self.thinking_budget)
        return SamplingParams(
            **given,
            max_new_tokens=max_new_tokens,
            min_tokens=min(self.min_tokens or 0, max_new_tokens),
            stop=self.stop,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        return bool(self.wants_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(SamplingFields):
    """The body of ``POST /v1/completions``."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[Any, AfterValidator(prompt_list), WithJsonSchema(PROMPTS_SCHEMA)]
    max_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(whole)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(whole)] = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N), BeforeValidator(whole)] = None

    suffix: Annotated[Any, Only("", None)] = None

    @field_validator("best_of")
    @classmethod
    def _is_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if value is not None and value != n:
            raise ValueError(f"best_of is {value} and n is {n}; every answer is returned, so best_of must equal n.")
        return value


class TemplateOptions(Strict):
    """``enable_thinking``: whether the model thinks before it answers; None: as its template does by default."""

    enable_thinking: bool | None = None


class Prediction(Strict):
    """A text that the answer may repeat in part, in which drafts are looked up."""

    type: Literal["content"]
    content: Annotated[Any, AfterValidator(content_text), WithJsonSchema(CONTENT_SCHEMA)]


class ChatRequest(SamplingFields):
    """The body of ``POST /v1/chat/completions``. ``max_completion_tokens`` takes precedence over ``max_tokens``."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_tokens: Annotated[int | None, Field(ge=1), BeforeValidator(whole)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1), BeforeValidator(whole)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(whole)] = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    prediction: Prediction | None = None
    segments: FieldOfSegments = ()
    chunks: FormerFieldOfSegments = ()
    recompute: Annotated[float | None, Field(ge=0, le=1), optional("number", minimum=0, maximum=1)] = None

    tools: Tools | None = None
    tool_choice: Annotated[Any, AfterValidator(chosen_tool), WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None

    functions: Annotated[Any, Only([], None)] = None
    function_call: Annotated[Any, Only("none", "auto", None)] = None
    modalities: Annotated[Any, Only(["text"], None)] = None
    audio: Annotated[Any, Only(None)] = None
    reasoning_effort: Annotated[Any, Only(None)] = None
    verbosity: Annotated[Any, Only(None)] = None
    web_search_options: Annotated[Any, Only(None)] = None

    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def ending(self) -> Ending:
        """How the prompt ends. Raises ApiError for contradictions, and for a last message that cannot be continued."""
        has_header = self.add_generation_prompt is not False
        if not self.continue_final_message:
            return Ending.HEADER if has_header else Ending.TURN
        if has_header:
            said = "continue_final_message is true and add_generation_prompt is not false; set that to false."
            raise invalid(said, param="add_generation_prompt")
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            said = "continue_final_message is true; the last message must be the assistant's, without tool_calls."
            raise invalid(said, param="continue_final_message")
        return Ending.OPEN

    @property
    def enable_thinking(self) -> bool | None:
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools, as they were sent."""
        return cast("list[dict[str, Any]]", self.tools or [])

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError(f"top_logprobs is {value} and logprobs is not true; set logprobs to true too.")
        return value
