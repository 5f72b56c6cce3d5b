"""``infer bench``: one command for each benchmark of the course. Introduced in phase 3.1."""

import typer

from shared.cli.bench.generation import COMMANDS as GENERATION_COMMANDS
from shared.cli.bench.grammar import COMMANDS as GRAMMAR_COMMANDS
from shared.cli.bench.hardware import COMMANDS as KERNEL_COMMANDS
from shared.cli.bench.serving import COMMANDS as SERVING_COMMANDS
from shared.cli.bench.speculation import COMMANDS as SPECULATION_COMMANDS
from shared.terminal import examples

app = typer.Typer(
    help="Measure this machine, the kernels and the phases; limits are measured in the same run.",
    no_args_is_help=True,
    epilog=examples("infer bench hardware", "infer bench kernels", "infer bench generation", "infer bench serving"),
)
_COMMANDS = KERNEL_COMMANDS | GENERATION_COMMANDS | SERVING_COMMANDS | SPECULATION_COMMANDS | GRAMMAR_COMMANDS
for _name, (_command, _epilog) in _COMMANDS.items():
    app.command(_name, epilog=_epilog)(_command)
