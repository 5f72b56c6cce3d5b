"""The command ``infer``, assembled from one file for each command. Introduced in phase 1b.

Every program of the course imports this first: the command, a phase's ``__main__``, and pytest. Invariants: a learner's
workspace is installed before any module that it may replace is imported; modules that need torch or transformers are
imported inside functions, so help and the tables of the course appear at once.
"""

from tutorial.workshop.overlay import install, is_enabled

if is_enabled():
    install()

from collections.abc import Callable

import typer

from shared.cli import chat, deploy, generate, models, segments, serve, simulate, trace, train
from shared.cli.bench import command as bench
from shared.cli.course import compare, diff, ladder, phases, roofline
from shared.terminal import GuardedGroup, examples
from tutorial.screens import workshop

app = typer.Typer(
    name="infer",
    help="An LLM inference engine that grows in phases: run each, compare them, measure what every idea gains.",
    cls=GuardedGroup,
    no_args_is_help=True,
    epilog=examples(
        "infer model pull smollm2-135m",
        'infer generate --prompt "The capital of France is"',
        "infer chat",
        "infer serve smollm2-135m --port 8000",
        "infer deploy smollm2-135m --replicas 2",
        "infer simulate --replicas 10,100,1000",
        "infer trace --compare contiguous,paged",
        "infer phases",
        "infer diff 01b 02",
        "infer ladder",
        "infer roofline llama-3.2-1b --gpu h100",
        "infer workshop start 01a",
    ),
    add_completion=False,
)
GROUPS: dict[str, typer.Typer] = {
    "deploy": deploy.app,
    "segments": segments.app,
    "phases": phases.app,
    "bench": bench.app,
    "model": models.app,
    "train": train.app,
    "workshop": workshop.app,
}
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "generate": (generate.generate, generate.EPILOG),
    "chat": (chat.chat, chat.EPILOG),
    "serve": (serve.serve, serve.EPILOG),
    "simulate": (simulate.simulate, simulate.EPILOG),
    "diff": (diff.diff, diff.EPILOG),
    "ladder": (ladder.ladder, ladder.EPILOG),
    "trace": (trace.trace, trace.EPILOG),
    "roofline": (roofline.roofline, roofline.EPILOG),
    "compare": (compare.compare, compare.EPILOG),
}
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)
app.add_typer(segments.app, name="chunks", hidden=True)  # the former name
for _name, (_function, _epilog) in COMMANDS.items():
    app.command(_name, epilog=_epilog)(_function)
