"""``infer simulate``: simulates a fleet of replicas. Follows phase 11.

The command reads its options and prints; :mod:`shared.simulation` simulates. Invariant: each router and each number of
replicas gets the same requests for a given seed, at the same rate per replica.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.cli.options import listed
from shared.deployment.affinity import MAX_KEYS
from shared.errors import ConfigError
from shared.terminal import examples, stdout_console, working

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.simulation.arrivals import Request
    from shared.simulation.step_times import StepTimes

EPILOG = examples(
    "infer simulate --replicas 10,100,1000",
    "infer simulate --replicas 100 --trace day --seconds 600 --rate 20",
    "infer simulate --replicas 100 --router least-busy,two-choices --report-seconds 0.5",
    "infer simulate --replicas 100 --update-at 30 --update-together 10",
    "infer simulate --replicas 32 --trace trace.jsonl --block-tokens 512",
)
WARM_UP = 0.25
"""The fraction of the time after which requests count; until then, caches and conversations fill."""


def simulate(
    replicas: Annotated[
        str, typer.Option("--replicas", "-r", help="Numbers of replicas, with commas.")
    ] = "10,100,1000",
    router: Annotated[
        str, typer.Option(help="prefix, two-choices, least-busy and round-robin, with commas.")
    ] = "prefix,two-choices,least-busy,round-robin",
    trace: Annotated[
        str,
        typer.Option(
            help=("How requests arrive: steady, poisson, bursts, day, or a file of recorded requests (JSON lines).")
        ),
    ] = "poisson",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second and replica; default: 10, or a recorded trace's own rate."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long requests arrive, in seconds; not for a recorded trace.")
    ] = 60.0,
    turns: Annotated[float, typer.Option(help="Mean number of turns of a conversation.")] = 4.0,
    pause: Annotated[float, typer.Option(help="Mean seconds from a turn to the next one.")] = 15.0,
    systems: Annotated[int, typer.Option(help="Number of system prompts with which conversations begin.")] = 64,
    system_tokens: Annotated[int, typer.Option(help="Tokens of a system prompt.")] = 384,
    turn_tokens: Annotated[int, typer.Option(help="Mean number of tokens that a turn adds to the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Mean number of tokens of an answer.")] = 192,
    gateways: Annotated[int, typer.Option(help="Number of routers; each knows only what it has sent itself.")] = 1,
    table_keys: Annotated[
        int, typer.Option(help="Number of prefix keys that a router remembers; default: as infer deploy.")
    ] = MAX_KEYS,
    report_seconds: Annotated[
        float, typer.Option(help="Seconds between reports of the loads to routers; 0: they always know them.")
    ] = 0.0,
    update_at: Annotated[
        float | None, typer.Option(help="Second from which on every replica drains and is replaced.")
    ] = None,
    update_together: Annotated[int, typer.Option(help="Number of replicas that are replaced at a time.")] = 1,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="A report of `python -m benchmarks.step_times`; default: Llama 3.2 1B on an H100, from our reports."
        ),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Maximum number of running requests of a replica.")] = 64,
    kv_tokens: Annotated[int, typer.Option(help="Number of tokens that a replica's KV cache holds.")] = 2**18,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens per block; for a file, those of the blocks that it names.")
    ] = 16,
    price: Annotated[float, typer.Option(help="Price of a replica per hour.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the requests and of the routers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Simulate many replicas behind a router: waits, first tokens, cache hits, balance and cost, from measured step
    times.
    """
    from benchmarks.simulation import table
    from benchmarks.view import View, show
    from shared.simulation.arrivals import SHAPES, Conversations, arrival_times, conversations, recorded
    from shared.simulation.fleet import Fleet, FleetPlan
    from shared.simulation.replica import EngineLimits
    from shared.simulation.results import serve

    times, source = _times(step_times)
    limits = EngineLimits(max_batch_size=max_batch_size, block_size=block_tokens, kv_tokens=kv_tokens)
    settings = Conversations(systems, system_tokens, turn_tokens, new_tokens, turns, pause, block_tokens=block_tokens)
    if price < 0:
        raise ConfigError(f"--price is {price:g}; it cannot be negative.")
    is_file = trace not in SHAPES
    if is_file and not Path(trace).is_file():
        raise ConfigError(f"--trace is {trace!r}; it must be one of {', '.join(SHAPES)}, or a file.")

    def requests(num_replicas: int) -> "Iterator[Request]":
        if is_file:
            return recorded(Path(trace), block_tokens, None if rate is None else rate * num_replicas)
        return conversations(arrival_times(trace, (rate or 10.0) * num_replicas, seconds, seed), settings, seed)

    extra: dict[str, Any] = {"gateways": gateways, "table_keys": table_keys, "report_seconds": report_seconds}
    extra |= {"update_at": update_at, "update_together": update_together}
    plans = [FleetPlan(num, name, **extra) for num in _numbers(replicas) for name in listed(router)]
    since = 0.0 if is_file else WARM_UP * seconds
    found = []
    for plan in plans:
        with working(f"simulating {plan.replicas:,} replicas, {plan.router}"):
            found.append(serve(Fleet(plan, times, limits, seed), requests(plan.replicas), since, price))
    if as_json:
        typer.echo(json.dumps({"step_times": asdict(times), "source": source, "results": found}))
    else:
        line = f"{trace if is_file else f'{trace}, {rate or 10:g} requests a second of each replica'}; {source}"
        show(View("Simulated fleet", [line], [table(found)]), stdout_console())


def _times(path: Path | None) -> "tuple[StepTimes, str]":
    """The step times and their source."""
    from benchmarks.report import read_value
    from benchmarks.step_times import COUNTS, times_of_reports
    from shared.simulation.step_times import StepTimes

    if path is None:
        found = dict(zip(COUNTS, times_of_reports()[0], strict=True))
        return StepTimes.of(found), "step times of Llama 3.2 1B on an H100"
    model, machine = read_value(path, "model.name"), read_value(path, "machine_title")
    return StepTimes.of(read_value(path, "results.step_times")), f"step times of {model} on {machine}"


def _numbers(text: str) -> list[int]:
    parts = listed(text)
    if not all(part.isdecimal() and 1 <= int(part) <= 10**5 for part in parts):
        raise ConfigError(f"--replicas is {text!r}; write whole numbers from 1 to 100000 with commas, such as 10,1000.")
    return [int(part) for part in parts]
