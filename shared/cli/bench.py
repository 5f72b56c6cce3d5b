"""``infer bench``: one command for each benchmark of the course. Introduced in phase 3.1."""

import typer

from shared.cli.bench_attention import ATTENTION_EPILOG, attention
from shared.cli.bench_generation import COMMANDS as GENERATION_COMMANDS
from shared.cli.bench_hardware import HARDWARE_EPILOG, KERNELS_EPILOG, hardware, kernels
from shared.cli.bench_serving import COMMANDS as SERVING_COMMANDS
from shared.cli.terminal import examples

app = typer.Typer(
    help="Measure this machine, the kernels and the phases; limits are measured in the same run.",
    no_args_is_help=True,
    epilog=examples("infer bench hardware", "infer bench kernels", "infer bench generation", "infer bench serving"),
)
app.command("hardware", epilog=HARDWARE_EPILOG)(hardware)
app.command("kernels", epilog=KERNELS_EPILOG)(kernels)
app.command("attention", epilog=ATTENTION_EPILOG)(attention)
for _name, (_command, _epilog) in (GENERATION_COMMANDS | SERVING_COMMANDS).items():
    app.command(_name, epilog=_epilog)(_command)
