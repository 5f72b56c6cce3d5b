"""Simulated fleets: tables, and the capacity of a replica against the number of replicas. Follows phase 11.

The capacity is the highest rate of requests, in steps of a tenth, at which 99 of 100 first tokens arrive within
``LIMIT_MS``. Invariant: all numbers of replicas and routers get requests of the same kind, equally many per replica.

    python -m benchmarks.simulation --out benchmarks/reports
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import run
from benchmarks.report import Report, read_value, rounded
from benchmarks.step_times import COUNTS, POINTS, times_of_reports
from benchmarks.view import Column, Lines, Table, View, percent, text
from shared.deployment.affinity import MAX_KEYS
from shared.simulation.arrivals import Conversations, arrival_times, conversations
from shared.simulation.fleet import Fleet, FleetPlan
from shared.simulation.replica import EngineLimits
from shared.simulation.results import serve
from shared.simulation.step_times import StepTimes

REPLICAS = (10, 30, 100, 300, 1000)
KEYS = MAX_KEYS * 16 // 512
"""Keys of a router's table: for as many tokens of text as the gateway's, whose keys represent about 16 tokens each."""
NODE = 8
ROUTERS = {
    "two-choices": ("two-choices", KEYS, None),
    "prefix": ("prefix", KEYS, None),
    "prefix-large-table": ("prefix", 32 * KEYS, None),
    "prefix-each-node": ("prefix", KEYS, NODE),
}
"""A name, the router, the keys of its table, and the number of replicas per gateway; None: one gateway for all."""
RATES = [rounded(1.1**n, 3) for n in range(40)]
"""The rates that are tried, in requests per second and replica."""
LIMIT_MS = 250.0
SECONDS, WARM_UP = 2.5, 1.0
LOAD = Conversations(
    system_tokens=4096, turn_tokens=1024, new_tokens=256, pause=0.5, max_tokens=16384, block_tokens=512
)
"""Agents: instructions, then what tools return."""
LIMITS = EngineLimits(max_batch_size=8, block_size=512)


def table(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each number of replicas and router, as described by :func:`shared.simulation.results.serve`."""

    def of(name: str, p: str) -> Any:
        return lambda row: row[name][p] if name in row else None

    columns = [
        Column("replicas", "replicas", "{:,}".format),
        text("router", "router"),
        Column("requests/s", "requests_per_second"),
        Column("queue, P99 ms", of("queue_wait_ms", "p99")),
        Column("first token, P50 ms", of("first_token_ms", "p50")),
        Column("P99 ms", of("first_token_ms", "p99")),
        Column("prompt tokens found", "hit_rate", percent),
        Column("busiest / mean", "balance"),
        Column("engine ms", "engine_ms"),
        Column("cost of 1,000", "cost_per_thousand"),
    ]
    return Table("", columns, results)


def capacity(replicas: int, router: str, times: StepTimes, guess: int) -> tuple[int, dict[str, Any]]:
    """The index in ``RATES`` of the highest rate that this many replicas sustain, and the results at that rate; the
    search begins at ``guess``.
    """

    def at(place: int) -> dict[str, Any]:
        moments = arrival_times("poisson", RATES[place] * replicas, SECONDS, seed=0)
        name, keys, share = ROUTERS[router]
        plan = FleetPlan(replicas, name, gateways=-(-replicas // share) if share else 1, table_keys=keys)
        fleet = Fleet(plan, times, LIMITS)
        return serve(fleet, conversations(moments, LOAD, seed=0), WARM_UP, price=0.0)

    def is_kept(found: dict[str, Any]) -> bool:
        return bool(found["first_token_ms"]["p99"] <= LIMIT_MS)

    found: dict[int, dict[str, Any]] = {}
    kept, lost, place, step = -1, len(RATES), guess, 1
    while lost - kept > 1:
        found[place] = at(place)
        if is_kept(found[place]):
            kept = place
        else:
            lost = place
        if kept < 0 or lost == len(RATES):  # away from the guess, in doubling steps, until the rate is bracketed
            place = max(guess - step, 0) if kept < 0 else min(guess + step, len(RATES) - 1)
            step *= 2
        else:
            place = (kept + lost) // 2
    return max(kept, 0), found[max(kept, 0)]


def measure_capacity(replicas: Sequence[int] = REPLICAS) -> Report:
    """Each number of replicas with each router, on step times from our reports."""
    file, *_ = POINTS[0]
    source = Path(__file__).parent / "reports" / f"{file}-llama-3.2-1b-nvidia-h100-80gb-hbm3.json"
    times = StepTimes.of(dict(zip(COUNTS, times_of_reports()[0], strict=True)))
    results: dict[str, Any] = {}
    for router in ROUTERS:
        place = 2 * len(RATES) // 3
        for num in replicas:
            place, found = capacity(num, router, times, place)
            kept = {name: found[name] for name in ("hit_rate", "balance", "engine_ms")}
            of_first = found["first_token_ms"]["p99"]
            results.setdefault(str(num), {})[router] = {
                "rate": RATES[place],
                "requests_per_second": rounded(RATES[place] * num),
                "first_token_p99_ms": rounded(of_first),
            } | {name: rounded(value) for name, value in kept.items()}
            print(json.dumps({"replicas": num, "router": router} | results[str(num)][router]), flush=True)
    flags = {"limit_ms": LIMIT_MS, "seconds": SECONDS, "warm_up": WARM_UP, "rates": RATES, "replicas": list(replicas)}
    flags |= {"routers": ROUTERS, "conversations": asdict(LOAD), "limits": asdict(LIMITS), "step_times": asdict(times)}
    return Report("capacity", read_value(source, "model"), {}, 0, flags, results)


def view(report: Report) -> View:
    rows = [
        {"replicas": int(num), "router": router, **found[router]}
        for num, found in report.results.items()
        for router in ROUTERS
    ]
    columns = [
        Column("replicas", "replicas", "{:,}".format),
        text("router", "router"),
        Column("requests/s of a replica", "rate"),
        Column("of all", "requests_per_second"),
        Column("first token, P99 ms", "first_token_p99_ms"),
        Column("prompt tokens found", "hit_rate", percent),
        Column("busiest / mean", "balance"),
    ]
    numbers = report.flags["replicas"]
    lines = [
        (router, [report.results[str(num)][router]["requests_per_second"] for num in numbers]) for router in ROUTERS
    ]
    subtitles = [f"the highest rate at which 99 of 100 first tokens come within {LIMIT_MS:g} ms; step times of an H100"]
    panels = [Lines("Requests a second, by replicas", numbers, lines)]
    return View(f"Simulated capacity: {report.model['name']}", subtitles, [Table("", columns, rows)], panels=panels)


if __name__ == "__main__":
    run(measure_capacity, view, __doc__)
