"""The experiments of the serving benchmark, each a question with its traces and contenders. Introduced in phase 4.

    workloads      W1, W2 and W3, every way to serve, one of them over HTTP too
    policies       W2 and W3 under each policy of continuous batching
    closed-loop    a queue that never empties: what a static batch and a continuous one can do at most
    tail           Poisson arrivals at a rate that static batching can just bear: who waits how long
    together       many requests at once, in one large batch
    http-overhead  the same streams over HTTP and into the engine, in turns

Invariants: within an experiment every contender serves the same traces, in this process or in one server process that
is started as a user would; none is measured before it is warm.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.report import rounded
from benchmarks.served_process import ServedProcess
from benchmarks.serving_contenders import Servers
from benchmarks.serving_results import figures, ratio, saturated_tokens_per_second
from benchmarks.serving_run import ServedRun
from benchmarks.timing import Steps
from benchmarks.workloads.serving import ServingSize, Trace, Workload, make_trace
from shared.engine.config import SCHEDULER_POLICIES

EXPERIMENTS = ("workloads", "policies", "closed-loop", "tail", "together", "http-overhead")
OVER_HTTP = ("http-overhead",)
"""Experiments that need a server whatever ways are asked for; ``workloads`` needs one for the way ``http``."""
LOAD = 0.8
"""The tail's rate, as a share of what static batching can do at most."""
CONTENDERS = ("sequential", "padded", "static", "continuous")


@dataclass
class Bench:
    """What the experiments share: sizes, contenders, the server, and how far they are."""

    size: ServingSize
    servers: Servers
    ways: tuple[str, ...]
    contenders: tuple[str, ...]
    vocab_size: int
    seed: int
    rate: float | None
    max_seconds: float | None
    serve: Callable[[], ServedProcess]  # the process over HTTP, started when it is first asked for
    steps: Steps
    capacity: float | None = None  # requests a second that static batching can do, once it has been measured

    def trace(self, workload: Workload, trial: int = 0, rate: float | None = None) -> Trace:
        return make_trace(workload, self.vocab_size, self.seed + trial, rate)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        with self.steps.step(text):
            yield

    def measure(self, name: str, batch: int, trace: Trace, what: str) -> tuple[ServedRun, dict[str, Any]]:
        with self.step(f"{what}: {name}"):
            return self.servers.get(name, batch).measure(trace, self.max_seconds)

    def measure_http(self, trace: Trace, what: str) -> tuple[ServedRun, dict[str, Any]]:
        """The same over HTTP, by the newest contender; what only an engine's steps tell is absent."""
        with self.step(f"{what}: over HTTP"):
            run = self.serve().serve(trace)
        title = f"continuous, over HTTP (phase {self.servers.continuous.number})"
        return run, {"title": title} | figures(run, http_batch(self.size), 0)


def http_batch(size: ServingSize) -> int:
    """The server's batch: it must hold the streams of every experiment that uses it."""
    return max(size.max_batch_size, size.streams.concurrency)


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
    """Throughput while requests wait, of both; static's, in requests, is the capacity that the tail refers to."""
    trace = bench.trace(bench.size.backlog)
    found: dict[str, Any] = {}
    for name in ("static", "continuous"):
        run, result = bench.measure(name, bench.size.max_batch_size, trace, "closed loop")
        found[name] = result | {"saturated_tokens_per_second": rounded(saturated_tokens_per_second(run))}
    keys = "saturated_tokens_per_second", "output_tokens_per_second"
    for key in keys:
        name = f"continuous_over_static_{key.removesuffix('_tokens_per_second')}"
        found[name] = ratio(found["continuous"][key], found["static"][key])
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
    """All requests at once, in batches that hold them all."""
    workload = bench.size.together
    trace = bench.trace(workload)
    return {
        name: bench.measure(name, workload.concurrency, trace, workload.title)[1] for name in ("static", "continuous")
    }


def run_http_overhead(bench: Bench) -> dict[str, Any]:
    """The same streams into the engine and over HTTP, trial by trial; the median of the ratios within a trial."""
    workload, batch = bench.size.streams, http_batch(bench.size)
    process = bench.serve()
    bench.servers.get("continuous", batch)
    speeds: dict[str, list[float]] = {"engine": [], "http": []}
    last: dict[str, Any] = {}
    for trial in range(bench.size.trials):
        trace = bench.trace(workload, trial)
        for way in ("engine", "http") if trial % 2 == 0 else ("http", "engine"):
            if way == "engine":
                last[way] = bench.measure("continuous", batch, trace, workload.title)[1]
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
    "tail": run_tail,
    "together": run_together,
    "http-overhead": run_http_overhead,
}


def num_steps(
    size: ServingSize, experiments: tuple[str, ...], ways: tuple[str, ...], contenders: tuple[str, ...]
) -> int:
    """Measurements of these experiments, for a progress display."""
    counts = {
        "workloads": 3 * (("engine" in ways) * len(contenders) + ("http" in ways)),
        "policies": 2 * len(SCHEDULER_POLICIES),
        "closed-loop": 2,
        "tail": 2 if "closed-loop" in experiments else 3,
        "together": 2,
        "http-overhead": 2 * size.trials,
    }
    return sum(counts[name] for name in experiments)
