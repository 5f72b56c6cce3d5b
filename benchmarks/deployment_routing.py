"""How requests should reach replicas: by prefix, the less busy of two, or in turns. Follows phase 11.

Conversations are served over HTTP by four replicas. A turn's prompt begins with all that was said before it, so the
replica that answered the turn before has its KV cache. The hit rate is the share of prompt tokens that were in the
cache of the replica they reached; the balance is the busiest replica's share of tokens over an equal share.
Invariant: every router serves the same traces, on replicas that are started for it, with empty caches.

    python -m benchmarks.deployment_routing --out benchmarks/reports
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.command import run
from benchmarks.report import Report, ratio, rounded
from benchmarks.serving.deployed import deployed, samples
from benchmarks.serving.http_load import MODEL, generate_load
from benchmarks.serving.results import figures
from benchmarks.setup import Setup
from benchmarks.view import Bar, Bars, Column, Table, View, percent, text
from benchmarks.workloads.serving import Workload, default_size, make_trace

ROUTERS = {"prefix": "by prefix", "two-choices": "the less busy of two", "round-robin": "in turns"}
QUERIES, HITS = "infer:prefix_cache_queries_total", "infer:prefix_cache_hits_total"
GENERATED = "infer:generation_tokens_total"
BLOCK = 16
SYSTEM = 32
"""Tokens of the system prompt."""


def conversations(device: str, num_turns: int) -> tuple[Workload, Workload]:
    """Each with words of its own, and all with the same system prompt."""
    one = default_size(device).conversation
    many = replace(one, name="conversations", title="Conversations", num_requests=24, concurrency=12, turns=num_turns)
    low, high = one.prompt_tokens
    shared = replace(many, prompt_tokens=(low + SYSTEM, high + SYSTEM), shared_prefix_tokens=SYSTEM)
    return many, replace(shared, name="shared", title="Conversations, one system prompt")


def measure_routing(
    model: str = "smollm2-135m",
    device: str = "cpu",
    dtype: str | None = None,
    replicas: int = 4,
    turns: int = 6,
    routers: Sequence[str] = tuple(ROUTERS),
    workloads: Sequence[str] = ("conversations", "shared"),
) -> Report:
    """Each workload with each router."""
    setup, batch, results = Setup(model, device, dtype, 1), 8, dict[str, Any]()
    named = {workload.name: workload for workload in conversations(device, turns)}
    chosen = [named[name] for name in workloads]
    longest = max(workload.longest for workload in chosen)
    blocks = 2 * chosen[0].concurrency * -(-longest // BLOCK)  # no replica need forget what it has computed
    settings = {"max_batch_size": batch, "max_seq_len": longest, "num_gpu_blocks": blocks}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    options += ["--device", setup.device, "--replicas", str(replicas), "--cpus", "0.5"]
    options += ["--dtype", setup.dtype] if setup.dtype else []
    with setup.running(1):
        for workload in chosen:
            found = results[workload.name] = {"title": workload.title, "about": workload.describe(), "routers": {}}
            for router in routers:
                trace = make_trace(workload, setup.shape.vocab_size, setup.seed)
                with deployed(setup.folder, [*options, "--router", router]) as url:
                    run = asyncio.run(generate_load(url, MODEL, trace))
                    counts = {name: list(samples(url, name).values()) for name in (QUERIES, HITS, GENERATED)}
                speeds = figures(run, batch, 1)
                if speeds["num_errors"]:
                    raise SystemExit(f"{router}: {next(each.error for each in run.requests if each.error)}")
                found["routers"][router] = {
                    "hit_rate": ratio(sum(counts[HITS]), sum(counts[QUERIES])),
                    "balance": rounded(max(counts[GENERATED]) / statistics.mean(counts[GENERATED])),
                    "tokens_by_replica": counts[GENERATED],
                    "requests": len(run.requests),
                    "requests_per_second": speeds["requests_per_second"],
                    "first_token_ms": speeds["time_to_first_token_ms"],
                }
        flags = {"replicas": replicas, "workloads": [asdict(workload) for workload in chosen]}
        return setup.report("deployment-routing", {"deploy": setup.config(**settings)}, flags, results)


def view(report: Report) -> View:
    columns = [
        text("router", "router"),
        Column("prompt tokens found", "hit_rate", percent),
        Column("busiest over mean", "balance"),
        Column("first token, P50 ms", lambda row: row["first_token_ms"]["p50"]),
        Column("P95 ms", lambda row: row["first_token_ms"]["p95"]),
        Column("requests/s", "requests_per_second"),
    ]
    tables, groups = [], []
    for each in report.results.values():
        rows = [{"router": ROUTERS[name], **found} for name, found in each["routers"].items()]
        tables.append(Table(f"{each['title']}: {each['about']}", columns, rows))
        bars = [Bar(row["router"], row["hit_rate"], percent(row["hit_rate"])) for row in rows]
        groups.append((each["title"], bars))
    about = [f"{report.flags['replicas']} replicas; {report.machine_title}; {report.date[:10]}"]
    panels = [Bars("Prompt tokens found in the cache of the replica", groups)]
    return View(f"Routing: {report.model['name']}", about, tables, panels=panels)


if __name__ == "__main__":
    run(measure_routing, view, __doc__)
