"""``infer simulate`` compared with real replicas: the same requests, with step times of the same replicas. Follows
phase 11.

Replicas on one machine share its processors, also with whatever else runs there. So the step times come from these very
replicas, recorded while they serve. A step takes at least as long as ``PACE`` says, as if a device computed it.
The trace is divided into windows: the steps of every second window give the coefficients, and the requests of the
others are compared. Invariant: no step of a window that is compared takes part in the fit.

    python -m benchmarks.deployment_check --model ./tiny-llama --out benchmarks/reports
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import run
from benchmarks.report import Report, rounded
from benchmarks.serving.deployed import noted_steps, samples, served_by
from benchmarks.serving.http_load import MODEL, generate_load
from benchmarks.serving.results import ServedRequest
from benchmarks.setup import Setup
from benchmarks.step_times import COUNTS, fit
from benchmarks.view import Column, Table, View, percent, text
from benchmarks.workloads.serving import Trace, TraceRequest
from shared.simulation.arrivals import Conversations, Request, arrival_times, conversations
from shared.simulation.fleet import Fleet, FleetPlan
from shared.simulation.replica import EngineLimits
from shared.simulation.step_times import StepTimes

LOAD = Conversations(systems=4, system_tokens=64, turn_tokens=32, new_tokens=16, turns=3.0, pause=4.0, max_tokens=480)
CASES = ((2, 6.0), (4, 12.0))
"""Numbers of replicas, each with the total requests per second."""
WINDOW = 3.0
"""Seconds per window; even windows are fitted, odd ones compared."""
PACE = (0.03, 0.0, 5e-4, 0.0, 2e-3, 0.0)
"""The minimum seconds of a step, for each of ``COUNTS``."""
BATCH, BLOCKS = 8, 1024
TARGET = 0.15
ROUTER_SEEDS = 20
"""Simulations with different random seeds of the router, of which the mean counts."""
FIGURES = {
    "first_token_ms": "first token, mean ms",
    "request_ms": "whole request, mean ms",
    "engine_ms": "engine, ms a request",
    "hit_rate": "prompt tokens found",
}
QUERIES, HITS = "infer:prefix_cache_queries_total", "infer:prefix_cache_hits_total"


def measure_check(model: str = "smollm2-135m", seconds: float = 36.0) -> Report:
    """Each number of replicas: the coefficients, the measurements, the simulation, and the errors."""
    setup = Setup(model, "cpu", None, 1)
    limits = EngineLimits(max_batch_size=BATCH, block_size=LOAD.block_tokens, kv_tokens=BLOCKS * LOAD.block_tokens)
    settings = {"max_batch_size": BATCH, "max_seq_len": LOAD.max_tokens, "num_gpu_blocks": BLOCKS}
    settings["prefill_chunk_size"] = limits.prefill_chunk_size
    results: dict[str, Any] = {}
    with setup.running(1):
        for num, rate in CASES:
            trace = _trace(rate, seconds, setup.seed + num)
            with tempfile.TemporaryDirectory() as notes:
                with served_by(setup.folder, num, settings, Path(notes), PACE) as url:
                    start, run, hit_rate = _served(setup, url, trace)
                steps = [(begun - start, counts, took) for begun, counts, took in noted_steps(Path(notes))]
            fitted = [(counts, took) for begun, counts, took in steps if not _is_compared(begun)]
            others = [took for begun, _, took in steps if begun >= 0 and _is_compared(begun)]
            times, error = _step_times(fitted)
            real = [
                (each.arrived, each.token_times[0] - each.arrived, (each.ended or 0.0) - each.arrived) for each in run
            ]
            found, first = _figures(real, True), _figures(real, False)["first_token_ms"]
            more = first - _simulated(trace, num, times, limits, False)["first_token_ms"]
            times = replace(times, request=max(0.0, 1e-3 * more))
            told = _simulated(trace, num, times, limits, True)
            num_compared = sum(_is_compared(each.arrival) for each in trace)
            found |= {"hit_rate": hit_rate, "engine_ms": rounded(1e3 * sum(others) / num_compared)}
            errors = {name: rounded(told[name] / found[name] - 1) for name in FIGURES}
            results[str(num)] = {
                "requests": num_compared,
                "requests_per_second": rate,
                "step_times": {name: rounded(value) for name, value in asdict(times).items()},
                "fit_median_error": error,
                "measured": found,
                "simulated": told,
                "errors": errors,
                "largest_error": max(map(abs, errors.values())),
            }
            print(json.dumps({num: results[str(num)]}), flush=True)
        flags = {"seconds": seconds, "window": WINDOW, "pace": PACE, "conversations": asdict(LOAD)}
        flags |= {"router_seeds": ROUTER_SEEDS, "target": TARGET}
        return setup.report("deployment-check", {"deploy": setup.config(**settings)}, flags, results)


def _is_compared(moment: float) -> bool:
    return bool(moment // WINDOW % 2)


def _trace(rate: float, seconds: float, seed: int) -> list[Request]:
    """Requests whose blocks are only those of their prompts: the next turn does not continue the answer."""
    found = list(conversations(arrival_times("poisson", rate, seconds, seed), LOAD, seed))
    for request in found:
        request.blocks = request.blocks[: request.prompt_tokens // LOAD.block_tokens]
    return found


def _served(setup: Setup, url: str, trace: list[Request]) -> tuple[float, list[ServedRequest], float]:
    """The start of the trace, its requests as real replicas served them, and the share of prompt tokens found in
    caches."""
    size, vocabulary = LOAD.block_tokens, setup.shape.vocab_size
    requests = []
    for number, each in enumerate(trace):
        blocks = [np.random.default_rng(block).integers(vocabulary, size=size) for block in each.blocks]
        rest = np.random.default_rng([number, len(trace)]).integers(vocabulary, size=each.prompt_tokens % size)
        prompt = tuple(np.concatenate([*blocks, rest]).tolist())
        requests.append(TraceRequest(prompt, each.new_tokens, each.arrival))
    start = time.perf_counter()
    run = asyncio.run(generate_load(url, MODEL, Trace(tuple(requests), None)))
    if errors := [each.error for each in run.requests if each.error]:
        raise SystemExit(errors[0])
    queries, hits = (sum(samples(url, name).values()) for name in (QUERIES, HITS))
    return start, run.requests, rounded(hits / queries)


def _figures(requests: Sequence[tuple[float, float, float]], is_compared: bool) -> dict[str, float]:
    """Means over the requests in such windows: arrival, seconds to the first token, and total seconds."""
    chosen = np.array([each[1:] for each in requests if _is_compared(each[0]) == is_compared])
    return {
        name: rounded(1e3 * value) for name, value in zip(("first_token_ms", "request_ms"), chosen.mean(0), strict=True)
    }


def _step_times(steps: list[tuple[list[float], float]]) -> tuple[StepTimes, float]:
    """Coefficients for which all steps together take as long as measured, and the median error of a step."""
    found = np.array(fit(steps))
    said = np.array([counts for counts, _ in steps]) @ found
    took = np.array([seconds for _, seconds in steps])
    found *= took.sum() / said.sum()
    error = float(np.median(np.abs(said * (took.sum() / said.sum()) / took - 1)))
    return StepTimes.of(dict(zip(COUNTS, map(float, found), strict=True))), rounded(error)


def _simulated(
    trace: list[Request], replicas: int, times: StepTimes, limits: EngineLimits, is_compared: bool
) -> dict[str, float]:
    """Means over the requests of such windows and several random seeds of the router; hits are for all requests."""
    found, share = [], times.request
    for seed in range(ROUTER_SEEDS):
        fleet = Fleet(FleetPlan(replicas), times, limits, seed)
        again = [Request(each.arrival, each.prompt_tokens, each.new_tokens, each.blocks) for each in trace]
        done = list(fleet.run(again))
        figures = [
            (one.arrival, one.first_token + share - one.arrival, one.ended + share - one.arrival) for one in done
        ]
        busy = sum(replica.seconds_busy for replica in fleet.replicas.values())
        hits = sum(one.num_cached for one in done) / sum(one.prompt_tokens for one in done)
        found.append(_figures(figures, is_compared) | {"engine_ms": 1e3 * busy / len(done), "hit_rate": hits})
    return {name: rounded(float(np.mean([each[name] for each in found]))) for name in FIGURES}


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
    subtitles = [f"{loads}; {report.machine_title}; {report.date[:10]}"]
    notes = [f"Target: each error at most {percent(TARGET)}."]
    return View(f"Simulated beside real replicas: {report.model['name']}", subtitles, [Table("", columns, rows)], notes)


if __name__ == "__main__":
    run(measure_check, view, __doc__)
