"""What Ray Serve costs: one replica beside ``infer serve``, requests a second and time to the first token.

Follows phase 11. Both run at the same time, and serve the same traces in turns. Invariant: both engines have the same
settings and threads, and both are warm before the first trial.

    python -m benchmarks.deployment_cost --out benchmarks/reports
"""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.command import run
from benchmarks.report import Report, ratio, rounded
from benchmarks.serving.deployed import deployed
from benchmarks.serving.http_load import MODEL, generate_load, served
from benchmarks.serving.results import figures
from benchmarks.setup import Setup
from benchmarks.timing import rotated
from benchmarks.view import Column, Table, View, text
from benchmarks.workloads.serving import default_size, make_trace
from shared.lessons import newest_lesson

LEAST_REQUESTS, MOST_MS = 0.9, 5.0
"""Targets: requests a second over those of ``infer serve``, and milliseconds more to the first token."""


def measure_cost(
    model: str = "smollm2-135m",
    device: str = "cpu",
    dtype: str | None = None,
    trials: int = 5,
    threads: int = 1,
    requests: int = 0,
) -> Report:
    """Medians of the trials, of each workload; it has as many requests as in the serving benchmark, or ``requests``."""
    setup, size = Setup(model, device, dtype, threads), default_size(device)
    workloads = [replace(each, num_requests=requests or each.num_requests) for each in (size.w1, size.w2, size.streams)]
    batch = max(workload.concurrency for workload in workloads)
    longest = max(workload.longest for workload in workloads)
    options = ["--device", setup.device, "--max-batch-size", str(batch), "--max-seq-len", str(longest)]
    options += ["--dtype", setup.dtype] if setup.dtype else []
    lesson, results = newest_lesson(), {}
    with (
        setup.running(1),
        served(lesson, setup.folder, options) as server,
        deployed(setup.folder, ["--replicas", "1", *options]) as url,
    ):
        urls = {"serve": server.url, "deploy": url}
        for workload in workloads:
            tries: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
            for trial in range(-1, trials):  # the first warms up
                for name in rotated(tuple(urls), trial):
                    trace = make_trace(workload, setup.shape.vocab_size, setup.seed + trial + 1)
                    run = asyncio.run(generate_load(urls[name], MODEL, trace))
                    found = figures(run, batch, 1)
                    if found["num_errors"]:
                        raise SystemExit(f"{name}: {next(each.error for each in run.requests if each.error)}")
                    if trial >= 0:
                        tries[name].append(found)
            results[workload.name] = compared(tries) | {"title": workload.title, "about": workload.describe()}
        engine = setup.config(max_batch_size=batch, max_seq_len=longest)
        flags = {"trials": trials, "workloads": [asdict(workload) for workload in workloads], "phase": lesson.number}
        return setup.report("deployment-cost", {"serve": engine}, flags, results)


def compared(tries: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The medians of both, and what the second costs over the first."""

    def median(name: str, key: Callable[[dict[str, Any]], float]) -> float:
        return rounded(statistics.median(key(each) for each in tries[name]))

    found: dict[str, Any] = {
        name: {
            "requests_per_second": median(name, lambda each: each["requests_per_second"]),
            "tokens_per_second": median(name, lambda each: each["output_tokens_per_second"]),
            "first_token_ms": median(name, lambda each: each["time_to_first_token_ms"]["p50"]),
            "between_tokens_ms": median(name, lambda each: each["inter_token_latency_ms"]["p50"]),
            "requests_per_second_trials": [each["requests_per_second"] for each in tries[name]],
            "first_token_ms_trials": [each["time_to_first_token_ms"]["p50"] for each in tries[name]],
        }
        for name in tries
    }
    serve, deploy = found["serve"], found["deploy"]
    return found | {
        "requests_ratio": ratio(deploy["requests_per_second"], serve["requests_per_second"]),
        "first_token_more_ms": rounded(deploy["first_token_ms"] - serve["first_token_ms"]),
    }


def view(report: Report) -> View:
    rows = [
        {"workload": each["title"], "server": title, **each[name]}
        | ({"ratio": each["requests_ratio"], "more": each["first_token_more_ms"]} if name == "deploy" else {})
        for each in report.results.values()
        for name, title in (("serve", "infer serve"), ("deploy", "infer deploy, one replica"))
    ]
    columns = [
        text("workload", "workload"),
        text("server", "server"),
        Column("requests/s", "requests_per_second"),
        Column("ratio", "ratio"),
        Column("first token, ms", "first_token_ms"),
        Column("more, ms", "more"),
        Column("between tokens, ms", "between_tokens_ms"),
    ]
    about = [f"{each['title']}: {each['about']}" for each in report.results.values()]
    about += [f"{report.machine_title}; medians of {report.flags['trials']} trials in turns; {report.date[:10]}"]
    target = f"Targets: a ratio of at least {LEAST_REQUESTS}, at most {MOST_MS:g} ms more to the first token."
    return View(f"Cost of Ray Serve: {report.model['name']}", about, [Table("", columns, rows)], [target])


if __name__ == "__main__":
    run(measure_cost, view, __doc__)
