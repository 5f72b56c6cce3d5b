"""The command ``infer``, assembled from one file for each command. Introduced in phase 1b.

Every program of the course imports this first: the command, a phase's ``__main__``, pytest. Invariants: a learner's
workspace is installed before any module that it may replace is imported; modules that need torch or transformers are
imported inside functions, so help and the tables of the course appear at once.
"""

from tutorial.workshop.overlay import install, is_enabled

if is_enabled():
    install()

from typing import Any

import typer

from shared.cli import chat, chunks, deploy, generate, models, serve, simulate, trace, train
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
_MODULES: dict[str, Any] = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "deploy": deploy,
    "simulate": simulate,
    "chunks": chunks,
    "phases": phases,
    "diff": diff,
    "ladder": ladder,
    "trace": trace,
    "bench": bench,
    "roofline": roofline,
    "compare": compare,
    "model": models,
    "train": train,
    "workshop": workshop,
}
for _name, _module in _MODULES.items():  # of one command, or of a group with an app of its own
    if hasattr(_module, "app"):
        app.add_typer(_module.app, name=_name)
    else:
        app.command(_name, epilog=_module.EPILOG)(getattr(_module, _name))
