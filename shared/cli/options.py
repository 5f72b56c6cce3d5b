"""The options that commands share, and the engine and sampling parameters made from them. Introduced in phase 2.

Engine options come from ``EngineConfig``: a field that is added there becomes an option of every command that starts an
engine, without a change here. Invariant: only ``EngineConfig`` and ``SamplingParams`` validate values, so a bad one
gives the same message on the command line, in a server and in Python.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from shared.engine.config import EngineConfig, option_name
from shared.errors import ConfigError, RequestError
from shared.lessons import Lesson, find_lesson, lesson_of, lessons
from shared.terminal import fetch_if_known, working

if TYPE_CHECKING:
    from shared.grammar.grammar import Grammar
    from shared.sampling.params import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])
FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
DEFAULT_MODEL = EngineConfig.model
BATCHING = (
    "max_batch_size",
    "max_num_batched_tokens",
    "max_waiting_requests",
    "batching_mode",
    "scheduler_policy",
    "max_decode_interval",
)
"""The fields that have no effect on one request at a time."""
OPTIMIZATIONS = "Optimizations"  # a separate panel: flags with a negative form would make any other panel too wide
_ENGINE, _SHOWN = "Engine", "Output"

Model = Annotated[
    str,
    typer.Option("--model", "-m", help=FIELDS["model"].metadata["help"], envvar="INFER_MODEL", rich_help_panel=_ENGINE),
]
Phase = Annotated[
    str | None,
    typer.Option(
        help="The phase whose engine runs, such as 02; default: the newest of the main line.", rich_help_panel=_ENGINE
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Let the model think first, if it can (Qwen 3).",
        rich_help_panel="Sampling",
        show_default=False,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="builtin:NAME, checkpoint, or a file; default: the built-in one that equals the checkpoint's.",
        rich_help_panel=_ENGINE,
    ),
]
Stats = Annotated[
    bool, typer.Option("--stats/--no-stats", help="Add a table: model, memory, work done.", rich_help_panel=_SHOWN)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Leave out the line of speeds after an answer.", rich_help_panel=_SHOWN)
]


def _sampling(name: str, kind: Any, default: Any, text: str, *short: str, **more: Any) -> Parameter:
    option = typer.Option(option_name(name), *short, help=text, rich_help_panel="Sampling", **more)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_TOKENS, _TEXTS = list[int] | None, list[str] | None
SAMPLING = (
    _sampling("max_tokens", int, 128, "Maximum tokens of an answer.", "-n"),
    _sampling("temperature", float, 0.0, "0 takes the likeliest token every time.", "-t"),
    _sampling("top_p", float, 1.0, "Keep the likeliest tokens up to this total probability."),
    _sampling("top_k", int | None, None, "Keep this many of the likeliest tokens; default: all."),
    _sampling("min_p", float, 0.0, "Keep tokens at least this times as likely as the likeliest."),
    _sampling("repetition_penalty", float, 1.0, "Above 1 makes tokens that have occurred less likely."),
    _sampling("presence_penalty", float, 0.0, "Subtract this from the logits of tokens that occur in the answer."),
    _sampling("frequency_penalty", float, 0.0, "Subtract this for each time that a token occurs in the answer."),
    _sampling("logit_bias", _TEXTS, None, "Add a number to a token's logit; may be repeated.", metavar="ID=BIAS"),
    _sampling("min_tokens", int, 0, "Do not end the answer before this many tokens."),
    _sampling("thinking_budget", int | None, None, "Close the thinking after this many tokens (phase 11.1)."),
    _sampling("min_thinking_tokens", int, 0, "Do not let the thinking end before this many tokens (phase 11.1)."),
    _sampling("seed", int | None, None, "The same seed gives the same answer; default: a random one."),
    _sampling("stop", _TEXTS, None, "End the answer before this text; may be repeated."),
    _sampling("stop_token_id", _TOKENS, None, "End the answer at this token; may be repeated."),
    _sampling("ignore_eos", bool, False, "Continue after an end-of-sequence token."),
    _sampling("json_schema", Path | None, None, "The answer is JSON that is valid for the schema in this file."),
    _sampling("regex", str | None, None, "The answer matches this regular expression as a whole."),
    _sampling("choice", _TEXTS, None, "The answer is one of these texts; repeat it."),
)
GRAMMARS = ("json_schema", "regex", "choice")


def take_sampling_params(settings: dict[str, Any]) -> "SamplingParams":
    """Take the sampling parameters out of a command's settings, leaving the engine's; raises RequestError.

    Without a seed, one is chosen here so that it can be shown.
    """
    from shared.sampling.params import SamplingParams

    values = {option.name: settings.pop(option.name) for option in SAMPLING}
    seed = values.pop("seed")
    return SamplingParams(
        max_new_tokens=values.pop("max_tokens"),
        logit_bias=dict(map(_bias, values.pop("logit_bias") or ())),
        stop=tuple(values.pop("stop") or ()),
        stop_token_ids=tuple(values.pop("stop_token_id") or ()),
        seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
        structured_output=take_grammar(values),
        **values,
    )


def take_grammar(settings: dict[str, Any]) -> "Grammar | None":
    """Make the grammar from a command's three options, at most one of which may be given; raises RequestError."""
    json_schema, regex, choice = (settings.pop(name) for name in GRAMMARS)
    if json_schema is None and regex is None and not choice:
        return None
    from shared.grammar.grammar import grammar_of

    try:
        schema = None if json_schema is None else json_schema.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The schema in {json_schema} cannot be read: {error}.") from None
    return grammar_of(json_schema=schema, regex=regex, choice=choice or None)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise RequestError(f"logit_bias is {text!r}; it must be a token id and a number, such as 284=-5.") from None


def checked_chat_template(setting: str | None) -> str | None:
    """The setting, with a file as its absolute path; raises ConfigError if it names neither a file nor a known
    template."""
    if setting is None:
        return None
    from shared.text.chat_format import checked_setting

    return checked_setting(setting)


def engine_options(*omitted: str, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command an option for each field of ``EngineConfig``; the values arrive in its ``**settings``.

    A field that the command declares as its own parameter is skipped.

    Args:
        omitted: the fields that the command does not offer.
        defaults: defaults that differ from the config's.
    """
    kinds = get_type_hints(EngineConfig)
    defaults = {name: field.default for name, field in FIELDS.items()} | {"device": "auto"} | defaults
    return _with_parameters(
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=Annotated[kinds[name], _option_of(field, kinds[name])],
        )
        for name, field in FIELDS.items()
        if name not in omitted
    )


def sampling_options(*names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command the options of ``SAMPLING``, or the ones in ``names``; the values arrive in its ``**settings``."""
    chosen = [option for option in SAMPLING if not names or option.name in names]
    return _with_parameters(option.replace(default=defaults.get(option.name, option.default)) for option in chosen)


def _option_of(field: "dataclasses.Field[Any]", kind: Any) -> Any:
    """The option of a field. Help shows it once the phase that introduces the field exists."""
    name = option_name(field.name)
    is_flag = bool in (kind, *get_args(kind))
    has_negative = is_flag and field.default is not False  # an option that is off by default can only be turned on
    return typer.Option(
        f"{name}/--no-{name[2:]}" if has_negative else name,
        help=field.metadata["help"],
        rich_help_panel=OPTIMIZATIONS if has_negative else _ENGINE,
        envvar="INFER_DEVICE" if field.name == "device" else None,
        hidden=field.metadata["phase"] not in {lesson.number for lesson in lessons()},
    )


def _with_parameters(added: Iterable[Parameter]) -> Callable[[Command], Command]:
    """Replace a command's ``**settings`` by explicit parameters in the signature that typer sees."""
    parameters = {parameter.name: parameter for parameter in added}

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = {name: one for name, one in signature.parameters.items() if one.kind is not Parameter.VAR_KEYWORD}
        changed = signature.replace(parameters=[*(own | {**parameters, **own}).values()])
        command.__signature__ = changed  # type: ignore[attr-defined]
        return command

    return decorate


def answering_lesson(number: str | None, settings: Mapping[str, Any]) -> Lesson:
    """The phase with this number, or the one that the settings need; raises ConfigError if it does not generate."""
    if number is None:
        return lesson_of(settings)
    lesson = find_lesson(number)
    if not lesson.generates:
        first = next(other.number for other in lessons() if other.generates)
        raise ConfigError(
            f"Phase {lesson.number} ({lesson.title}) does not generate, it only runs a forward pass: run `python -m "
            f"{lesson.module_name} forward`, or choose phase {first} or a later one with --phase."
        )
    return lesson


def batching_lesson(reason: str, number: str | None, settings: Mapping[str, Any]) -> Lesson:
    """The lesson of `answering_lesson`, whose engine must run requests together. Raises ConfigError, with ``reason``,
    if it does not."""
    lesson = answering_lesson(number, settings)
    if not lesson.batches:
        able = ", ".join(other.number for other in lessons() if other.batches)
        raise ConfigError(f"Phase {lesson.number} ({lesson.title}) {reason}; choose one of these with --phase: {able}.")
    return lesson


def given(context: typer.Context, *names: str) -> dict[str, Any]:
    """The values of those of a command's options (or of ``names`` among them) that were given on its command line."""
    sources = {name: context.get_parameter_source(name) for name in names or context.params}
    chosen = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return {name: context.params[name] for name in chosen}


def listed(text: str | None) -> tuple[str, ...]:
    """The comma-separated parts of a text."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def load_engine(lesson: Lesson, model: str, *, is_alone: bool = False, **settings: Any) -> Any:
    """The phase's engine with its model loaded; fetches a known model.

    Args:
        is_alone: requests come one at a time, so the engine reserves no memory for others.
        settings: fields of ``EngineConfig``.
    """
    from shared.loading.placement import check_device
    from shared.server.http.logs import configure

    config = EngineConfig(model=model, **settings)
    config = dataclasses.replace(config, device=str(check_device(config.device)))
    fetch_if_known(model)
    if config.if_log_compress or config.if_log_num_topp:
        configure("text")
    with working(f"loading {model}"):
        return lesson.engine_alone(config) if is_alone else lesson.engine(config)
