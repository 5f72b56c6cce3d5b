"""``infer simulate`` beside real replicas: the same requests, with step times of the same replicas. Follows phase 11.

Replicas that share the processors of one machine slow each other down, so their step times are those of just these
replicas: engines that note their steps serve one trace, which gives the coefficients, and then another one, which is
simulated with them. Invariant: nothing of the second trace takes part in the fit.

    python -m benchmarks.deployment_check --out benchmarks/reports
"""

import argparse
import asyncio
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report, rounded, write_report
from benchmarks.serving.deployed import samples, served_by, take_steps
from benchmarks.serving.http_load import MODEL, generate_load
from benchmarks.setup import Setup
from benchmarks.step_times import COUNTS, fit
from benchmarks.view import Column, Table, View, percent, text
from benchmarks.workloads.serving import Trace, TraceRequest
from shared.simulation.arrivals import Conversations, Request, arrival_times, conversations
from shared.simulation.fleet import Fleet, FleetPlan
from shared.simulation.replica import EngineLimits
from shared.simulation.results import serve
from shared.simulation.step_times import StepTimes

ABOUT = Conversations(systems=4, system_tokens=64, turn_tokens=32, new_tokens=12, turns=3.0, pause=4.0, max_tokens=480)
CASES = ((2, 1.5), (4, 2.0))
"""Replicas, and requests a second of all of them."""
BATCH, BLOCKS = 8, 1024
TARGET = 0.15
ROUTER_SEEDS = 20
"""Simulations with other draws of the router, of which the mean counts."""
FIGURES = {
    "first_token_ms": "first token, mean ms",
    "request_ms": "whole request, mean ms",
    "engine_ms": "engine, ms a request",
    "hit_rate": "prompt tokens found",
}
QUERIES, HITS = "infer:prefix_cache_queries_total", "infer:prefix_cache_hits_total"


def measure_check(setup: Setup, cases: tuple[tuple[int, float], ...], seconds: float) -> Report:
    """Each number of replicas: the coefficients, what was measured, what was simulated, and the errors."""
    settings = {"max_batch_size": BATCH, "max_seq_len": ABOUT.max_tokens, "num_gpu_blocks": BLOCKS}
    limits = EngineLimits(max_batch_size=BATCH, block_size=ABOUT.block_tokens, kv_tokens=BLOCKS * ABOUT.block_tokens)
    results: dict[str, Any] = {}
    with setup.running(1):
        for num, rate in cases:
            first, second = ([*_trace(rate, seconds, seed)] for seed in (setup.seed + 1, setup.seed + 2))
            with tempfile.TemporaryDirectory() as folder:
                notes = Path(folder)
                with served_by(setup.folder, num, settings, notes) as (url, _):
                    fitted, steps = _served(setup, url, first, notes)
                    found, _ = _served(setup, url, second, notes)
            times, error = _step_times(steps)
            more = fitted["first_token_ms"] - _simulated(first, num, times, limits)["first_token_ms"]
            times = replace(times, request=max(0.0, 1e-3 * more))
            told = _simulated(second, num, times, limits)
            errors = {name: rounded(told[name] / found[name] - 1) for name in FIGURES}
            results[str(num)] = {
                "requests": len(second),
                "requests_per_second": rate,
                "step_times": {name: rounded(value) for name, value in asdict(times).items()},
                "fit_median_error": error,
                "measured": found,
                "simulated": told,
                "errors": errors,
                "largest_error": max(map(abs, errors.values())),
            }
        flags = {"seconds": seconds, "conversations": asdict(ABOUT), "router_seeds": ROUTER_SEEDS, "target": TARGET}
        return setup.report("deployment-check", {"deploy": setup.config(**settings)}, flags, results)


def _trace(rate: float, seconds: float, seed: int) -> list[Request]:
    """Requests whose blocks are those of their prompts alone: the next turn does not go on with what was answered."""
    found = list(conversations(arrival_times("poisson", rate, seconds, seed), ABOUT, seed))
    for request in found:
        request.blocks = request.blocks[: request.prompt_tokens // ABOUT.block_tokens]
    return found


def _served(
    setup: Setup, url: str, trace: list[Request], notes: Path
) -> tuple[dict[str, Any], list[tuple[list[float], float]]]:
    """What real replicas make of a trace, and the counts and seconds of each of their steps."""
    size, vocabulary = ABOUT.block_tokens, setup.shape.vocab_size
    requests = []
    for number, each in enumerate(trace):
        blocks = [np.random.default_rng(block).integers(vocabulary, size=size) for block in each.blocks]
        rest = np.random.default_rng([number, len(trace)]).integers(vocabulary, size=each.prompt_tokens % size)
        prompt = tuple(np.concatenate([*blocks, rest]).tolist())
        requests.append(TraceRequest(prompt, each.new_tokens, each.arrival))
    before = {name: sum(samples(url, name).values()) for name in (QUERIES, HITS)}
    run = asyncio.run(generate_load(url, MODEL, Trace(tuple(requests), None)))
    if errors := [each.error for each in run.requests if each.error]:
        raise SystemExit(errors[0])
    counts = {name: sum(samples(url, name).values()) - before[name] for name in (QUERIES, HITS)}
    steps = take_steps(notes)
    done = run.finished
    found = {
        "first_token_ms": rounded(1e3 * float(np.mean([each.token_times[0] - each.arrived for each in done]))),
        "request_ms": rounded(1e3 * float(np.mean([(each.ended or 0.0) - each.arrived for each in done]))),
        "engine_ms": rounded(1e3 * sum(seconds for _, seconds in steps) / len(done)),
        "hit_rate": rounded(counts[HITS] / counts[QUERIES]),
    }
    return found, steps


def _step_times(steps: list[tuple[list[float], float]]) -> tuple[StepTimes, float]:
    """Coefficients by which all steps together take as long as they did, and the median error of a step."""
    found = np.array(fit(steps))
    said = np.array([counts for counts, _ in steps]) @ found
    took = np.array([seconds for _, seconds in steps])
    found *= took.sum() / said.sum()
    error = float(np.median(np.abs(said * (took.sum() / said.sum()) / took - 1)))
    return StepTimes.of(dict(zip(COUNTS, map(float, found), strict=True))), rounded(error)


def _simulated(trace: list[Request], replicas: int, times: StepTimes, limits: EngineLimits) -> dict[str, Any]:
    """Means over several draws of the router; each run gets the requests as they are before they are served."""
    runs = []
    for seed in range(ROUTER_SEEDS):
        again = [Request(each.arrival, each.prompt_tokens, each.new_tokens, each.blocks) for each in trace]
        runs.append(serve(Fleet(FleetPlan(replicas), times, limits, seed), again, 0.0, 0.0))
    means = {"first_token_ms": "first_token_mean_ms", "request_ms": "request_mean_ms"}
    return {name: rounded(float(np.mean([run[means.get(name, name)] for run in runs]))) for name in FIGURES}


def view(report: Report) -> View:
    rows = []
    for num, each in report.results.items():
        for name, title in FIGURES.items():
            one = {"replicas": num if name == "first_token_ms" else "", "what": title}
            rows.append(one | {key: each[key][name] for key in ("measured", "simulated", "errors")})
    columns = [
        text("replicas", "replicas"),
        text("", "what"),
        Column("measured", "measured"),
        Column("simulated", "simulated"),
        Column("error", "errors", percent),
    ]
    loads = ", ".join(f"{each['requests']} requests at {num} replicas" for num, each in report.results.items())
    about = [f"{loads}; {report.machine_title}; {report.date[:10]}"]
    notes = [f"Target: each error at most {percent(TARGET)}."]
    return View(f"Simulated beside real replicas: {report.model['name']}", about, [Table("", columns, rows)], notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    report = measure_check(Setup(asked.model, "cpu", None, 1), CASES, asked.seconds)
    for path in write_report(report, asked.out, view=view(report)) if asked.out else ():
        print(f"wrote {path}")
    print(report.line())


if __name__ == "__main__":
    main()
