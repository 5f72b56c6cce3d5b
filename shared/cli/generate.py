"""``infer generate``: one prompt, one answer. Introduced in phase 2."""

import sys
import time
from typing import Annotated, Any

import typer

from shared.cli import options
from shared.cli.answer import TerminalAnswer, show_stats, show_summary
from shared.errors import RequestError
from shared.terminal import examples, printable

EPILOG = examples(
    'infer generate --prompt "The capital of France is" --max-tokens 16',
    'infer generate --chat --prompt "Why is the sky blue?" --temperature 0.7 --seed 1',
    "infer generate --model ./my-model --prompt - --quiet < question.txt",
    'infer generate --phase 02 --prompt "Once upon a time" --stop "." --stats',
    'infer generate --chat --choice yes --choice no --prompt "Is a whale a fish?"',
)


@options.engine_options(*options.BATCHING)
@options.sampling_options()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads it from standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Apply the model's chat template, or continue the text.")
    ] = False,
    model: options.Model = options.DEFAULT_MODEL,
    phase: options.Phase = None,
    thinking: options.Thinking = None,
    chat_template: options.ChatTemplate = None,
    stats: options.Stats = False,
    quiet: options.Quiet = False,
    **settings: Any,
) -> None:
    """Answer one prompt: the text streams to standard output, then a line of speeds to standard error."""
    text = _read_prompt(prompt)
    if (thinking is not None or chat_template is not None) and not chat:
        raise RequestError(
            "--thinking, --no-thinking and --chat-template apply to chat only; add --chat, or leave them out."
        )
    chat_template = options.checked_chat_template(chat_template)
    params = options.take_sampling_params(settings)
    lesson = options.answering_lesson(phase, settings)
    started = time.perf_counter()
    engine = options.load_engine(lesson, model, is_alone=True, **settings)
    load_seconds = time.perf_counter() - started
    answer = TerminalAnswer(_chat_ids(engine, text, thinking, chat_template) if chat else engine.tokenizer.encode(text))
    if not chat and sys.stdout.isatty():  # the answer continues the prompt
        typer.secho(printable(text), dim=True, nl=False)
    profile: dict[str, float | int] = {}
    if stats and hasattr(engine, "scheduler"):
        from shared.tracing.profiler import Profiler

        with Profiler(engine) as profiler:
            answer.stream(engine, params)
        profile = profiler.stats()
    else:
        answer.stream(engine, params)
    if stats:
        show_stats(lesson, engine, answer, None if params.is_greedy else params.seed, load_seconds, profile)
    if not quiet:
        show_summary(answer)


def _read_prompt(prompt: str) -> str:
    """The text of the prompt; from standard input, without its last line break. Raises RequestError if it is empty."""
    text = prompt
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise RequestError(f"Standard input is not UTF-8 text ({error}); convert it first.") from None
    if not text:
        raise RequestError(
            "The prompt is empty ('' was given); pass some text with --prompt, or pipe it into --prompt -."
        )
    return text


def _chat_ids(engine: Any, text: str, thinking: bool | None, setting: str | None) -> list[int]:
    from shared.text.chat import ChatMessage
    from shared.text.chat_format import chat_format

    chosen = chat_format(engine.tokenizer, engine.model.config.family, setting)
    return chosen.encode([ChatMessage("user", text)], thinking=thinking)
