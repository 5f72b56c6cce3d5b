"""``infer deploy``: the server on many replicas, through Ray Serve. Follows phase 11.

Invariant: settings are validated before Ray starts; without Ray each command says in one sentence what to install.
"""

import signal
import time
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shared.cli import options
from shared.cli.serve import (
    ApiKey,
    Host,
    MaxBodyBytes,
    NamedEvents,
    Port,
    Served,
    load_warm,
    model_name,
    serving_lesson,
)
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.terminal import examples, fetch_if_known, stdout_console, working

EPILOG = examples(
    "infer deploy smollm2-135m --replicas 2",
    "infer deploy ./my-model --replicas 2 --max-replicas 8 --address auto",
    "infer deploy status",
    "infer deploy down",
)
_fleet = partial(typer.Option, rich_help_panel="Replicas")
_server = partial(typer.Option, rich_help_panel="Server")


class _ModelFirst(TyperGroup):
    """A command group whose first argument is either a command or a model."""

    default = "start"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="deploy",
    help="Serve a model on many replicas, through Ray Serve: MODEL, or one of the commands.",
    cls=_ModelFirst,
    no_args_is_help=True,
    epilog=EPILOG,
)


Address = Annotated[
    str | None,
    typer.Option("--address", help="The Ray cluster to join; default: the one on this machine.", envvar="RAY_ADDRESS"),
]


@app.command("start", epilog=EPILOG)
@options.engine_options()
def start(
    model: Served = options.DEFAULT_MODEL,
    replicas: Annotated[int, _fleet("--replicas", "-r", help="The number of replicas; the minimum if they scale.")] = 1,
    max_replicas: Annotated[int | None, _fleet(help="Scale up to this many by load; default: never scale.")] = None,
    target_ongoing_requests: Annotated[
        int | None, _fleet(help="Requests per replica to scale for; default: --max-batch-size.")
    ] = None,
    upscale_delay: Annotated[float, _fleet(help="Seconds of higher load before replicas are added.")] = 10.0,
    downscale_delay: Annotated[float, _fleet(help="Seconds of lower load before replicas are removed.")] = 300.0,
    router: Annotated[str, _fleet(help="prefix, two-choices or round-robin.")] = "prefix",
    cpus: Annotated[
        float | None, _fleet(help="Processors that Ray reserves for a replica; default: one for each rank.")
    ] = None,
    gpus: Annotated[
        float | None,
        _fleet(help="GPUs that Ray reserves for each replica; default: one for each rank if --device is one."),
    ] = None,
    address: Address = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Annotated[
        str | None, _server(help="The model's name in requests; default: as infer serve.")
    ] = None,
    api_key: ApiKey = None,
    named_events: NamedEvents = False,
    allowed_hosts: Annotated[
        str | None, _server(help="Hosts, with commas, that requests may name in the header Host.")
    ] = None,
    grace: Annotated[
        float, _server(help="Seconds within which a replica's requests may finish before it ends.")
    ] = 30.0,
    chat_template: options.ChatTemplate = None,
    max_body_bytes: MaxBodyBytes = 2 * 2**20,
    phase: options.Phase = None,
    **settings: Any,
) -> None:
    """Serve MODEL on replicas: starts Ray and runs until interrupted, or updates a running cluster and returns."""
    _check_ray()
    from shared.deployment import application
    from shared.loading.placement import check_device
    from shared.loading.resolve import resolve_model
    from shared.server.process import address_of, bind
    from shared.server.settings import ServerConfig

    lesson = serving_lesson(phase, settings)
    config = ServerConfig(
        model_name=served_model_name or model_name(model),
        api_key=api_key,
        named_events=named_events,
        allowed_hosts=options.listed(allowed_hosts),
        grace=grace,
        max_body_bytes=max_body_bytes,
        chat_template=options.checked_chat_template(chat_template),
    )
    device = settings["device"] = str(check_device(settings["device"]))
    engine_config = EngineConfig(model=model, **settings)
    engine_config.check(lesson.load("engine").SUPPORTED)
    is_gpu = device.startswith("cuda")
    most = engine_config.max_batch_size
    ranks = engine_config.tensor_parallel_size
    fleet = application.Fleet(
        replicas=replicas,
        max_replicas=max_replicas or replicas,
        target_ongoing_requests=target_ongoing_requests or most,
        upscale_delay=upscale_delay,
        downscale_delay=downscale_delay,
        max_ongoing_requests=most + engine_config.max_waiting_requests,
        ranks=ranks,
        cpus=float(ranks) if cpus is None else cpus,
        gpus=float(is_gpu * ranks) if gpus is None else gpus,
        router=router,
    )
    is_ours = not application.join(address)
    url = "the address of that cluster"
    if is_ours:
        bound = bind(host, port)
        url, port = address_of(bound), bound.getsockname()[1]
        bound.close()
    fetch_if_known(model)
    resolve_model(model)
    load = partial(load_warm, lesson.number, model, "json", False, **settings)
    try:
        if is_ours:
            with working("starting Ray"):
                application.start()
        else:
            application.check_proxies()
        application.listen(host, port)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray installs its own handler, which prints a stack
        with working(f"deploying {model} on {replicas} replicas"):
            application.deploy(load, config, fleet, is_process=is_gpu)
        typer.echo(f"{config.model_name} is served at {url} by {replicas} replicas of phase {lesson.number}", err=True)
        while is_ours and application.is_deployed():
            time.sleep(1)
    finally:
        if is_ours:
            application.end()


@app.command("status")
def status(address: Address = None) -> None:
    """Show which replicas are running, starting and stopping."""
    _check_ray()
    from rich.table import Table

    from shared.deployment import application

    _join(address)
    table = Table("application", "part", "status", "replicas", "message", box=None)
    for name, one in application.status().applications.items():
        for part, found in one.deployments.items():
            states = ", ".join(f"{num} {state.lower()}" for state, num in found.replica_states.items() if num)
            table.add_row(name, part, found.status.lower(), states, found.message)
    stdout_console().print(table)


@app.command("down")
def down(address: Address = None) -> None:
    """Take the application down; open requests may finish first. A Ray that `infer deploy` started ends with it."""
    _check_ray()
    from shared.deployment import application

    _join(address)
    application.remove()


def _check_ray() -> None:
    if find_spec("ray") is None:
        raise ConfigError("infer deploy needs Ray Serve: pip install 'infer-course[ray]', or '.[ray]' in a checkout.")


def _join(address: str | None) -> None:
    from shared.deployment import application

    if not application.join(address):
        raise ConfigError("No Ray cluster runs on this machine; start one with infer deploy MODEL, or name --address.")
