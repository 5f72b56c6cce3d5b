"""The command line of one phase: ``python -m phases.phase_02 generate …``. Introduced in phase 1b.

Every phase's ``__main__.py`` has the same few lines; its commands follow from the methods of the phase's engine.
Invariant: a command here is the `infer` command of the same name with ``--phase`` set.
"""

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from shared.cli import chat, generate, options, serve
from shared.cli.bench.generation import contexts
from shared.cli.course.ladder import ladder
from shared.engine.config import EngineConfig
from shared.errors import RequestError
from shared.lessons import Lesson, find_lesson
from shared.terminal import GuardedGroup, examples, fetch_if_known, printable, stdout_console, working

REPEATS = 5
_FORWARD = ("dtype", "device", "attention_backend")
_forward_options = options.engine_options(*(name for name in options.FIELDS if name not in _FORWARD))


def run_phase(package: str) -> None:
    """Run the command line of the phase with this package, such as ``phases.phase_02``."""
    lesson = find_lesson(package.rpartition(".")[2])
    number = lesson.number
    chosen: dict[str, Any] = {command: {"phase": number} for command in ("generate", "chat", "serve")}
    chosen["bench"] = {"phase": [number]}
    # A spawned process imports the main module first, unless that is a package's `__main__`. With this module as the
    # main module, the learner's workspace is installed before the process imports an engine.
    sys.modules["__main__"].__spec__ = __spec__
    phase_app(lesson)(prog_name=f"python -m {package}", default_map=chosen)


def phase_app(lesson: Lesson) -> typer.Typer:
    """The commands of the phase: ``forward`` in 1a and 1b, then ``generate``, ``chat``, ``bench`` and ``serve``."""
    app = typer.Typer(
        help=f"Phase {lesson.number}: {lesson.title}. {lesson.question}",
        cls=GuardedGroup,
        no_args_is_help=True,
        add_completion=False,
    )
    app.callback(help=app.info.help)(_no_options)
    command = f"python -m {lesson.module_name}"
    forward = FORWARD.get(lesson.number)
    if forward is not None:
        app.command("forward", epilog=examples(f"{command} forward", f"{command} forward --dtype bfloat16"))(forward)
    else:
        commands = {"generate": generate, "chat": chat} | ({"serve": serve} if lesson.batches else {})
        for name, module in commands.items():
            app.command(name, epilog=module.EPILOG.replace(f"infer {name}", f"{command} {name}"))(getattr(module, name))
        # The ladder begins with the phase after the plain loop, whose cost by context is measured separately.
        app.command("bench", epilog=examples(f"{command} bench"))(contexts if lesson.previous == "01b" else ladder)
    return app


@_forward_options
def forward_layer(
    model: options.Model = options.DEFAULT_MODEL,
    layer: Annotated[int, typer.Option(help="The layer, counted from 0.")] = 0,
    tokens: Annotated[int, typer.Option(help="The number of tokens, with random hidden states.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the random hidden states.")] = 0,
    **settings: Any,
) -> None:
    """Run one layer on random hidden states; print shapes, root mean squares and the time of a pass."""
    import torch

    engine = _forward_engine("01a", model, settings, layer=layer)
    limit = engine.config.max_position_embeddings
    if not 1 <= tokens <= limit:
        raise RequestError(f"--tokens is {tokens}; this model takes 1 to {limit} tokens.")
    generator = torch.Generator().manual_seed(seed % 2**63)
    x = torch.randn(tokens, engine.config.hidden_size, generator=generator)
    positions = torch.arange(tokens)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        y = engine.forward(x, positions).cpu()
        seconds.append(time.perf_counter() - started)
    rows = {
        "layer": f"{layer} of {engine.config.num_layers}, {engine.config.family}",
        "dtype, device": f"{str(engine.dtype).removeprefix('torch.')}, {engine.device}",
        "hidden states in": f"{list(x.shape)}, RMS {_rms(x):.4f}",
        "hidden states out": f"{list(y.shape)}, RMS {_rms(y):.4f}",
        "one pass": f"{1000 * sorted(seconds)[REPEATS // 2]:.2f} ms (median of {REPEATS})",
    }
    for name, value in rows.items():
        typer.echo(f"{name:17}  {value}")


@_forward_options
def forward_model(
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text whose next token is predicted.")
    ] = "The capital of France is",
    top: Annotated[int, typer.Option(help="The number of likeliest next tokens to show.")] = 5,
    model: options.Model = options.DEFAULT_MODEL,
    **settings: Any,
) -> None:
    """Run the model once over a prompt and print the likeliest next tokens with their probabilities."""
    if not prompt:
        raise RequestError("The prompt is empty ('' was given); pass some text with --prompt.")
    if top < 1:
        raise RequestError(f"--top is {top}; it must be at least 1.")
    engine = _forward_engine("01b", model, settings)
    console = stdout_console()
    for text, probability in engine.top_tokens(prompt, min(top, engine.model.config.vocab_size)):
        console.print(f"{probability:8.4f}  {printable(text)!r}", markup=False, soft_wrap=True)


FORWARD: dict[str, Callable[..., None]] = {"01a": forward_layer, "01b": forward_model}
"""The command ``forward`` of the phases that do not generate, by number."""


def _forward_engine(number: str, model: str, settings: dict[str, Any], **more: Any) -> Any:
    """The engine of a phase before generation; ``EngineConfig`` validates its settings, as everywhere."""
    config = EngineConfig(model=model, **settings)
    config.check({"model", *_FORWARD})
    fetch_if_known(model)
    with working(f"loading {model}"):
        return find_lesson(number).engine(
            model,
            dtype=config.torch_dtype,
            device=config.device,
            attention_backend=config.attention_backend or "sdpa",
            **more,
        )


def _rms(x: Any) -> float:
    return float(x.float().square().mean().sqrt())


def _no_options() -> None:
    """A callback makes the only command of a phase a sub-command too."""
