"""The command ``infer``, assembled from one file for each command. Introduced in phase 1b.

Every program of the course imports this first: the command, a phase's ``__main__``, pytest. Invariants: a learner's
workspace is installed before any module that it may replace is imported; modules that need torch or transformers are
imported inside functions, so help and the tables of the course appear at once.
"""

from tutorial.workshop.overlay import install, is_enabled

if is_enabled():
    install()

import typer

from shared.cli import chunks, deploy, models, train
from shared.cli.bench import command as bench
from shared.cli.chat import EPILOG as CHAT_EPILOG
from shared.cli.chat import chat
from shared.cli.course import phases
from shared.cli.course.compare import EPILOG as COMPARE_EPILOG
from shared.cli.course.compare import compare
from shared.cli.course.diff import EPILOG as DIFF_EPILOG
from shared.cli.course.diff import diff
from shared.cli.course.ladder import EPILOG as LADDER_EPILOG
from shared.cli.course.ladder import ladder
from shared.cli.course.roofline import ROOFLINE_EPILOG, roofline
from shared.cli.generate import EPILOG as GENERATE_EPILOG
from shared.cli.generate import generate
from shared.cli.serve import EPILOG as SERVE_EPILOG
from shared.cli.serve import serve
from shared.cli.simulate import EPILOG as SIMULATE_EPILOG
from shared.cli.simulate import simulate
from shared.cli.trace import EPILOG as TRACE_EPILOG
from shared.cli.trace import trace
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
app.command("generate", epilog=GENERATE_EPILOG)(generate)
app.command("chat", epilog=CHAT_EPILOG)(chat)
app.command("serve", epilog=SERVE_EPILOG)(serve)
app.add_typer(deploy.app, name="deploy")
app.command("simulate", epilog=SIMULATE_EPILOG)(simulate)
app.add_typer(chunks.app, name="chunks")
app.add_typer(phases.app, name="phases")
app.command("diff", epilog=DIFF_EPILOG)(diff)
app.command("ladder", epilog=LADDER_EPILOG)(ladder)
app.command("trace", epilog=TRACE_EPILOG)(trace)
app.add_typer(bench.app, name="bench")
app.command("roofline", epilog=ROOFLINE_EPILOG)(roofline)
app.command("compare", epilog=COMPARE_EPILOG)(compare)
app.add_typer(models.app, name="model")
app.add_typer(train.app, name="train")
app.add_typer(workshop.app, name="workshop")
