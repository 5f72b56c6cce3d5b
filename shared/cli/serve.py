"""``infer serve``: a model behind an OpenAI-compatible server. Introduced in phase 4.

Invariant: errors are reported before the server listens: an invalid setting first, then a port in use, then the model's
errors.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from shared.cli import options
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson
from shared.terminal import examples

EPILOG = examples(
    "infer serve smollm2-135m --port 8000",
    "infer serve ./my-model --max-batch-size 64 --api-key secret",
    "infer serve smollm2-135m --phase 04",
    "curl localhost:8000/v1/completions -H 'Content-Type: application/json' "
    """-d '{"model": "smollm2-135m", "prompt": "Once upon a time"}'""",
)
_server = partial(typer.Option, rich_help_panel="Server")

Host = Annotated[str, _server(help="The address to listen on; 0.0.0.0 for every interface.")]
Port = Annotated[int, _server(help="The port; 0 for a free one.", min=0, max=65535)]
ApiKey = Annotated[str | None, _server(help="The API key that requests must send.", envvar="INFER_API_KEY")]
NamedEvents = Annotated[
    bool, _server("--named-events", help="Always stream /v1/completions as the events token, done and error.")
]
MaxBodyBytes = Annotated[int, _server(help="Bytes of the longest body.")]
Served = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a known name, or a hub name.", envvar="INFER_MODEL")
]


@options.engine_options()
def serve(
    model: Served = options.DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Annotated[
        str | None, _server(help="The model's name in requests; default: the folder's name, or the name as given.")
    ] = None,
    api_key: ApiKey = None,
    named_events: NamedEvents = False,
    allowed_hosts: Annotated[
        str | None,
        _server(
            help="Hosts, with commas, that requests may name in the header Host; *.example.com is every subdomain."
        ),
    ] = None,
    openai_statuses: Annotated[
        bool,
        _server("--openai-statuses", help="Refuse with OpenAI's statuses: 400 for 422, 404 for another model's name."),
    ] = False,
    allowed_origins: Annotated[
        str | None,
        _server(
            help="Sites, with commas, whose pages may send requests, such as https://example.com; * is every site."
        ),
    ] = None,
    root_path: Annotated[str, _server(help="The base path under which a proxy serves this server, such as /llm.")] = "",
    default_max_tokens: Annotated[
        str | None,
        _server(
            help="Tokens of an answer whose request names no limit; context: all that fit; default: 128, chat 512."
        ),
    ] = None,
    generation_config: Annotated[
        bool,
        _server(
            "--generation-config/--no-generation-config",
            help="Take sampling settings that a request leaves out from the model's generation_config.json.",
        ),
    ] = True,
    max_connections: Annotated[int, _server(help="Open connections; one more is refused with 503.")] = 2048,
    grace: Annotated[float, _server(help="Seconds after SIGTERM within which running requests may finish.")] = 30.0,
    send_timeout: Annotated[
        float, _server(help="Seconds after which a client that does not read is disconnected.")
    ] = 20.0,
    close_objects: Annotated[
        bool,
        _server(
            "--close-objects",
            help="Close objects whose schema lists properties without additionalProperties or patternProperties.",
        ),
    ] = False,
    max_body_bytes: MaxBodyBytes = 2 * 2**20,
    chat_template: options.ChatTemplate = None,
    log_format: Annotated[
        str | None, _server(help="json or text; default: text on a terminal, otherwise json.")
    ] = None,
    verbose: Annotated[bool, _server("--verbose", help="Log requests for health, metrics and pages too.")] = False,
    phase: options.Phase = None,
    engine_process: Annotated[
        bool | None,
        typer.Option(
            "--engine-process/--engine-thread",
            help="Run the engine in its own process, or on a thread of the server; default: a process on a GPU.",
            rich_help_panel=options.OPTIMIZATIONS,
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's completions and chat, streaming, metrics, and a page to try it on."""
    from shared.server.http.logs import FORMATS, configure
    from shared.server.settings import ServerConfig

    style = log_format or ("text" if sys.stderr.isatty() else "json")
    if style not in FORMATS:
        raise ConfigError(f"--log-format is {style!r}; it must be one of {', '.join(FORMATS)}.")
    lesson = serving_lesson(phase, settings)
    config = ServerConfig(
        model_name=served_model_name or model_name(model),
        api_key=api_key,
        named_events=named_events,
        allowed_hosts=options.listed(allowed_hosts),
        allowed_origins=options.listed(allowed_origins),
        root_path=root_path,
        **_default_tokens(default_max_tokens),
        openai_statuses=openai_statuses,
        max_connections=max_connections,
        grace=grace,
        send_timeout=send_timeout,
        close_objects=close_objects,
        max_body_bytes=max_body_bytes,
        chat_template=options.checked_chat_template(chat_template),
    )
    from shared.loading.generation_config import sampling_defaults
    from shared.loading.placement import check_device, device_name
    from shared.loading.resolve import resolve_model
    from shared.server.process import bind, run

    device = settings["device"] = str(check_device(settings["device"]))
    EngineConfig(model=model, **settings).check(lesson.load("engine").SUPPORTED)
    bound = bind(host, port)
    load = partial(load_warm, lesson.number, model, style, verbose, **settings)
    from shared.server.app import make_app
    from shared.server.engine.loop import EngineHandle
    from shared.server.engine.process import EngineProcess
    from shared.server.engine.thread import EngineThread

    is_process = device.startswith("cuda") if engine_process is None else engine_process
    handle: EngineHandle = EngineProcess(load) if is_process else EngineThread(load())
    if generation_config:
        config = replace(config, sampling_defaults=sampling_defaults(resolve_model(model)))
    configure(style, verbose=verbose)
    app = make_app(handle, config)
    chosen = app.state.intake.chat.format
    run(
        app,
        config,
        bound,
        model=config.model_name,
        chat_template=chosen and chosen.name,
        phase=lesson.number,
        device=device_name(device),
    )


def _default_tokens(value: str | None) -> dict[str, Any]:
    """The settings of ``--default-max-tokens``; raises ConfigError."""
    if value is None:
        return {}
    if value != "context" and not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise ConfigError(f"--default-max-tokens is {value!r}; it must be a number of at least 1, or context.")
    count = None if value == "context" else int(value)
    return {"max_tokens": count, "max_chat_tokens": count}


def load_warm(number: str, model: str, log_format: str, verbose: bool, **settings: Any) -> Any:
    """Load and warm up a phase's engine; configures the log, since this may run in a separate process."""
    from shared.engine.warm_up import warm_up
    from shared.server.http.logs import configure

    engine = options.load_engine(serving_lesson(number), model, **settings)
    warm_up(engine)
    configure(log_format, verbose=verbose)
    return engine


def serving_lesson(number: str | None, settings: Mapping[str, Any] = MappingProxyType({})) -> Lesson:
    """The phase with this number, or the one that the settings need; raises ConfigError if it cannot be served."""
    return options.batching_lesson("runs one request at a time and cannot be served", number, settings)


def model_name(model: str) -> str:
    """The model's name in requests: the name of its folder, or the name as given."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model
