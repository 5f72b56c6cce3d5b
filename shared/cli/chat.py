"""``infer chat``: a conversation in the terminal, through the model's chat template. Introduced in phase 2.

Invariant: the prompt is exactly the conversation on the screen; a turn that was refused, or interrupted before its
first token, is not part of it.
"""

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Any

import typer

from shared.cli import options
from shared.cli.answer import TerminalAnswer, show_summary
from shared.errors import InferError
from shared.terminal import complain, examples

if TYPE_CHECKING:
    from shared.sampling.params import SamplingParams

EPILOG = examples(
    "infer chat",
    "infer chat --temperature 0.7 --top-p 0.9",
    "infer chat --model ./my-qwen3 --no-thinking",
    "printf 'Hello!\\nAnd now in French.\\n' | infer chat --quiet",
)
HELP = """\
/reset        forget the conversation (the system message stays)
/system TEXT  set the system message; without TEXT, remove it
/help         show this
/exit, /quit  leave, as at the end of input
Ctrl-C        stop an answer; at the prompt, leave"""


@options.engine_options(*options.BATCHING)
@options.sampling_options(max_tokens=512)
def chat(
    model: options.Model = options.DEFAULT_MODEL,
    phase: options.Phase = None,
    thinking: options.Thinking = None,
    chat_template: options.ChatTemplate = None,
    quiet: options.Quiet = False,
    **settings: Any,
) -> None:
    """Chat with a model; /help lists the commands of a conversation."""
    params = options.take_sampling_params(settings)
    chat_template = options.checked_chat_template(chat_template)
    lesson = options.answering_lesson(phase, settings)
    engine = options.load_engine(lesson, model, is_alone=True, **settings)
    conversation = Conversation(engine, params, thinking, chat_template)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
        _say(f"{model}, phase {lesson.number}: {lesson.title}. /help lists the commands, /exit leaves.")
    if isinstance(sys.stdin, io.TextIOWrapper):  # an invalid byte becomes U+FFFD and does not end the program
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input("you> " if is_terminal else "").strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            _command(conversation, line)
        elif line:
            _turn(conversation, line, quiet)


class Conversation:
    """The messages so far and the engine; raises ModelFolderError for a model without a chat template."""

    def __init__(self, engine: Any, params: "SamplingParams", thinking: bool | None, setting: str | None) -> None:
        from shared.text.chat import ChatMessage
        from shared.text.chat_format import chat_format

        self.engine = engine
        self.params = params
        self.system = ""
        self.turns: list[ChatMessage] = []
        chosen = chat_format(engine.tokenizer, engine.model.config.family, setting)
        self._message = ChatMessage
        self._encode = lambda messages: chosen.encode(messages, thinking=thinking)
        self._encode([ChatMessage("user", "?")])  # refuses an invalid `thinking` now

    def prompt_ids(self, text: str) -> list[int]:
        """The conversation with ``text`` as its next message."""
        system = [self._message("system", self.system)] if self.system else []
        return self._encode([*system, *self.turns, self._message("user", text)])

    def add(self, question: str, answer: str) -> None:
        self.turns += [self._message("user", question), self._message("assistant", answer)]


def _turn(conversation: Conversation, text: str, quiet: bool) -> None:
    """Answer one message; an error ends the turn, not the conversation."""
    limit = conversation.engine.max_seq_len
    try:
        answer = TerminalAnswer(conversation.prompt_ids(text))
    except InferError as error:
        complain(error)
        return
    if answer.num_prompt_tokens >= limit:
        _say(
            f"With this message the conversation has {answer.num_prompt_tokens} tokens; the limit is {limit}, answer "
            "included, so it was not sent. /reset starts a new conversation; --max-seq-len sets the limit."
        )
        return
    try:
        answer.stream(conversation.engine, conversation.params)
    except InferError as error:
        complain(error)
        return
    except KeyboardInterrupt:
        typer.echo()
        _say("(stopped)")
    if answer.text:
        conversation.add(text, answer.text)
    if answer.finish_reason is None:
        return
    if answer.num_prompt_tokens + answer.num_tokens >= limit:
        _say(f"The conversation has reached the limit of {limit} tokens; /reset starts a new one.")
    if not quiet:
        show_summary(answer)


def _command(conversation: Conversation, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        conversation.turns.clear()
        _say("The conversation is empty now.")
    elif name == "/system":
        conversation.system = rest.strip()
        _say("The system message is set." if conversation.system else "There is no system message now.")
    elif name == "/help":
        _say(HELP)
    else:
        _say(f"There is no command {name}. The commands are:\n{HELP}")


def _say(text: str) -> None:
    """Write a message from the program, which is not part of the conversation, to standard error."""
    typer.secho(text, dim=True, err=True)
