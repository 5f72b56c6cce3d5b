"""The experiments of the serving benchmark, each a question with its traces and contenders. Introduced in phase 4.

    workloads      W1, W2 and W3, every way to serve, one of them over HTTP too
    policies       W2 and W3 under each policy of continuous batching
    closed-loop    a queue that never empties: what a static batch and continuous ones can do at most
    together       many requests at once, in one large batch
    capacity       and
    whole-step     regions and blocks (:mod:`benchmarks.serving.memory`)
    http-overhead  the same streams over HTTP and into the engine, in turns
    tail           Poisson arrivals at a rate that static batching can just bear: who waits how long; it takes longest

Invariants: within an experiment every contender serves the same traces, in this process or in one server process that
is started as a user would; none is measured before it is warm.
"""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.report import rounded
from benchmarks.serving.experiment_bench import Bench, http_batch, trial_ratios
from benchmarks.serving.lineup import Lineup
from benchmarks.serving.memory import run_capacity, run_whole_step
from benchmarks.serving.results import ratio, saturated_tokens_per_second
from benchmarks.workloads.serving import ServingSize
from shared.engine.config import SCHEDULER_POLICIES

EXPERIMENTS = ("workloads", "policies", "closed-loop", "together", "capacity", "whole-step", "http-overhead", "tail")
OVER_HTTP = ("http-overhead",)
"""Experiments that need a server whatever ways are asked for; ``workloads`` needs one for the way ``http``."""
LOAD = 0.8
"""The tail's rate, as a share of what static batching can do at most."""


def run_workloads(bench: Bench) -> dict[str, Any]:
    """W1 to W3, every contender; throughput beside the first contender's."""
    found = {}
    for name, workload in bench.size.workloads.items():
        trace = bench.trace(workload, rate=bench.rate)
        results: dict[str, Any] = {}
        if "engine" in bench.ways:
            for contender in bench.contenders:
                results[contender] = bench.measure(contender, bench.size.max_batch_size, trace, workload.title)[1]
        if "http" in bench.ways:
            results["http"] = bench.measure_http(trace, workload.title)[1]
        base = next(iter(results.values()))["output_tokens_per_second"]
        for result in results.values():
            result["gain"] = ratio(result["output_tokens_per_second"], base)
        found[name] = results
    return found


def run_policies(bench: Bench) -> dict[str, Any]:
    """W2 and W3 under each policy."""
    found = {}
    for workload in (bench.size.w2, bench.size.w3):
        trace = bench.trace(workload, rate=bench.rate)
        found[workload.name] = {
            policy: bench.measure(policy, bench.size.max_batch_size, trace, f"{workload.title}, policy")[1]
            for policy in SCHEDULER_POLICIES
        }
    return found


def run_closed_loop(bench: Bench) -> dict[str, Any]:
    """Throughput while requests wait, in turns; static's, in requests, is the capacity that the tail refers to."""
    backlog, names = bench.size.backlog, ("static", *bench.servers.lineup.continuous)
    found: dict[str, Any] = bench.in_turns(
        names, bench.size.max_batch_size, backlog, "closed loop", saturated_tokens_per_second
    )
    for name in names:
        found[name]["saturated_tokens_per_second"] = found[name].pop("tokens_per_second_median")
    for name in names[1:]:
        shares = trial_ratios(found[name], found["static"])
        found[f"{name}_over_static_saturated_trials"] = [rounded(share) for share in shares]
        found[f"{name}_over_static_saturated"] = rounded(statistics.median(shares))
        outputs = [found[each]["output_tokens_per_second"] for each in (name, "static")]
        found[f"{name}_over_static_output"] = ratio(*outputs)
    trace = bench.trace(backlog)
    mean_tokens = trace.new_tokens / len(trace.requests)
    bench.capacity = found["static"]["saturated_tokens_per_second"] / mean_tokens
    found["static_capacity_requests_per_second"] = rounded(bench.capacity)
    return found


def run_tail(bench: Bench) -> dict[str, Any]:
    """Poisson arrivals at ``LOAD`` of static's capacity; waits and whole latencies of both."""
    if bench.capacity is None:
        run, _ = bench.measure("static", bench.size.max_batch_size, bench.trace(bench.size.backlog), "tail, capacity")
        mean_tokens = bench.trace(bench.size.backlog).new_tokens / bench.size.backlog.num_requests
        bench.capacity = saturated_tokens_per_second(run) / mean_tokens
    rate = LOAD * bench.capacity
    trace = bench.trace(bench.size.tail, rate=rate)
    found: dict[str, Any] = {
        "rate_requests_per_second": rounded(rate),
        "static_capacity_requests_per_second": rounded(bench.capacity),
        "load": LOAD,
    }
    for name in ("static", "continuous"):
        found[name] = bench.measure(name, bench.size.max_batch_size, trace, "tail")[1]
    for key in ("queue_wait_ms", "request_latency_ms", "time_to_first_token_ms"):
        both = [(found[name][key] or {}).get("p99") for name in ("continuous", "static")]
        found[f"continuous_over_static_p99_{key.removesuffix('_ms')}"] = ratio(*both)
    return found


def run_together(bench: Bench) -> dict[str, Any]:
    """All requests at once, in batches that hold them all; in turns, since it takes a second or two."""
    workload = bench.size.together
    return bench.in_turns(("static", *bench.servers.lineup.continuous), workload.concurrency, workload, workload.title)


def run_http_overhead(bench: Bench) -> dict[str, Any]:
    """The same streams into the engine and over HTTP, trial by trial; the median of the ratios within a trial."""
    workload, batch = bench.size.streams, http_batch(bench.size)
    process = bench.serve()
    newest = bench.servers.lineup.continuous[-1]
    bench.servers.get(newest, batch)
    speeds: dict[str, list[float]] = {"engine": [], "http": []}
    last: dict[str, Any] = {}
    for trial in range(bench.size.trials):
        trace = bench.trace(workload, trial)
        for way in ("engine", "http") if trial % 2 == 0 else ("http", "engine"):
            if way == "engine":
                last[way] = bench.measure(newest, batch, trace, workload.title)[1]
            else:
                last[way] = bench.measure_http(trace, workload.title)[1]
            speeds[way].append(last[way]["output_tokens_per_second"])
    shares = [http / engine for http, engine in zip(speeds["http"], speeds["engine"], strict=True)]
    return last | {
        "engine_tokens_per_second_trials": speeds["engine"],
        "http_tokens_per_second_trials": speeds["http"],
        "http_over_engine_trials": [rounded(share) for share in shares],
        "http_over_engine": rounded(statistics.median(shares)),
        "client_processes": process.clients,
    }


RUN: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "workloads": run_workloads,
    "policies": run_policies,
    "closed-loop": run_closed_loop,
    "together": run_together,
    "capacity": run_capacity,
    "whole-step": run_whole_step,
    "http-overhead": run_http_overhead,
    "tail": run_tail,
}


def num_steps(
    size: ServingSize, experiments: tuple[str, ...], ways: tuple[str, ...], contenders: tuple[str, ...], lineup: Lineup
) -> int:
    """Measurements of these experiments, for a progress display."""
    many = len(lineup.continuous)
    counts = {
        "workloads": 3 * (("engine" in ways) * len(contenders) + ("http" in ways)),
        "policies": 2 * len(SCHEDULER_POLICIES),
        "closed-loop": (1 + many) * size.trials,
        "tail": 2 if "closed-loop" in experiments else 3,
        "together": (1 + many) * size.trials,
        "capacity": 1 + many,
        "whole-step": many * size.trials,
        "http-overhead": 2 * size.trials,
    }
    return sum(counts[name] for name in experiments)
