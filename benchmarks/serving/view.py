"""Reports of the serving benchmark and of the matrix, formatted for a reader. Introduced in phase 4."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.report import Report
from benchmarks.serving.contenders import PEERS
from benchmarks.serving.experiments import DECODE, EXPERIMENTS, SATURATED, SPEED, Experiment, value_at
from benchmarks.view import Bar, Bars, Column, Lines, Table, View, count, number, percent, percentiles, text, times

Runs = dict[str, dict[str, Any]]
COUNTED = ("num_errors", "preemptions", "tokens_recomputed")
NAME = text("", "title")
TOKENS = Column("tokens/s", SPEED)
LATENCIES = {
    "queue_wait_ms": "queue wait",
    "time_to_first_token_ms": "first token",
    "inter_token_latency_ms": "between tokens",
    "request_latency_ms": "whole",
}
PERCENTILES = tuple(Column(f"{words}, P50 / P95 / P99 (ms)", key, percentiles) for key, words in LATENCIES.items())
PLACES = Column("places used", "slot_utilisation", percent)
WAITING = Column("tokens/s while requests wait", SATURATED)
COMPUTED = Column("tokens computed", "tokens_computed", count)
STEP, STEPS = Column("ms/step", "mean_step_ms"), Column("steps", "steps", count)
REQUESTS = Column("requests/s", "requests_per_second")
PEAK, BATCH = Column("at a time, peak", "peak_concurrent", count), Column("batch of up to", "max_batch_size", count)
WRITTEN = Column("memory written", "saturated_kv_utilisation", percent)
TRIALS = Column("tokens/s of each trial", "tokens_per_second_trials", lambda found: joined(found))
INCIDENTS = tuple(Column(name.replace("_", " "), name, count) for name in COUNTED)
PASSES = Column("forward passes", "forward_passes", count)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "speeds": (TOKENS, Column("over the first", "gain", times), REQUESTS, PLACES, STEPS, PASSES, COMPUTED),
    "decode": (Column("decoded tokens/s", DECODE), TRIALS, TOKENS, PERCENTILES[1], PERCENTILES[2]),
    "latencies": PERCENTILES,
    "fairness": (*PERCENTILES, TOKENS, Column("starvation incidents", lambda run: incidents(run), count)),
    "loop": (WAITING, TOKENS, PLACES, STEP, PASSES),
    "held": (PEAK, Column("mean", "mean_concurrent"), BATCH, WRITTEN, WAITING),
    "costs": (*INCIDENTS, COMPUTED, STEP, TOKENS),
    "trials": (TOKENS, TRIALS),
    "turns": (Column("prompt tokens computed, by turn", "prompt_tokens_by_turn", lambda found: joined(found)),),
}
RATIOS = (
    *(text(words, words) for words in ("experiment", "what", "of", "over")),
    Column("ratio", "ratio", times),
    text("of the trials", lambda row: row["range"] and " to ".join(map(times, row["range"]))),
)
CURVE = (("first token, P50", "time_to_first_token_ms.p50"), ("between tokens, P99", "inter_token_latency_ms.p99"))


def joined(values: Iterable[float]) -> str:
    return " / ".join(map(number, values))


def subtitles(report: Report) -> list[str]:
    """What ran, in a line."""
    flags, size = report.flags, ", demo size (no GPU)" if report.flags["is_demo_size"] else ""
    words = f"greedy, {flags['dtype']}, batches of up to {flags['max_batch_size']}, seed {report.seed}{size}"
    return [f"{words}; {report.date[:10]}."]


def all_runs(node: Any) -> Runs:
    """Every served trace below a node of the results, by its dotted key."""
    if not isinstance(node, dict):
        return {}
    if "num_errors" in node:
        return {"": node}
    return {f"{key}.{rest}".rstrip("."): run for key in node for rest, run in all_runs(node[key]).items()}


def incidents(run: Mapping[str, Any]) -> int:
    """Decode stalls and overtaken requests."""
    return (run["decode_stalls"] or 0) + (run["requests_overtaken"] or 0)


def view(report: Report) -> View:
    """A report of `measure_serving`."""
    tables, speeds = [], []
    for experiment, name, heading, found in _parts(report):
        runs = all_runs(found)
        for n, shown in enumerate(experiment.shows):
            tables.append(Table(f"{heading} ({shown})" if n else heading, (NAME, *COLUMNS[shown]), [*runs.values()]))
        group = f"{experiment.name}: {report.flags['workloads'][name]['title']}"
        bars = []
        for key, run in runs.items():
            speed = run[experiment.speed] or 0.0
            bars.append(Bar(run["title"], speed, number(speed), "peer" if key in PEERS else "ours"))
        speeds.append((group, bars))
    if ratios := _ratios(report):
        tables.append(Table("Ratios", RATIOS, ratios))
    title = f"Serving: {report.model['name']} on {report.machine_title}"
    panels: list[Bars | Lines] = [Bars("Output tokens a second", speeds)]
    if curve := all_runs(report.results.get("chunk_size")):
        sizes = [run["settings"]["prefill_chunk_size"] for run in curve.values()]
        lines = [(words, [value_at(run, key) for run in curve.values()]) for words, key in CURVE]
        panels.append(Lines("Milliseconds, by tokens of a chunk", sizes, lines))
    return View(title, subtitles(report), tables, _notes(report), panels=panels)


def _parts(report: Report) -> Iterator[tuple[Experiment, str, str, Any]]:
    """Each experiment and workload that ran: the workload's name, a heading and the results."""
    for experiment in EXPERIMENTS:
        found = report.results.get(experiment.key, {})
        for name in experiment.workloads if found else ():
            workload = report.flags["workloads"][name]
            heading = f"{workload['title']}: {workload['about']}"
            if experiment.name in ("policies", "whole-step", "pairs"):
                heading = f"{experiment.name.capitalize()}, {heading}"
            if experiment.load:
                rate = number(found["rate_requests_per_second"])
                heading += f"; Poisson arrivals at {rate} a second, {found['load']} of what "
                heading += f"{found[experiment.load[2]]['title']} can do"
            if experiment.name == "capacity":
                heading += f"; {number(found['wide_slots']['memory_kv_bytes'] / 1e6)} MB of KV cache for each"
            if experiment.in_turns:
                heading += f"; median of {report.flags['trials']} trials in turns"
            yield experiment, name, heading, found[name] if len(experiment.workloads) > 1 else found


def _ratios(report: Report) -> list[dict[str, Any]]:
    """A row for each ratio: what is compared, and of which contender over which."""
    return [
        {
            "experiment": f"{experiment.name}, {report.flags['workloads'][name]['title']}",
            "what": each.words,
            "of": found[over]["title"],
            "over": found[each.under]["title"],
            "ratio": found[key],
            "range": found.get(f"{key}_range"),
        }
        for experiment, name, _, found in _parts(report)
        for each in experiment.ratios
        for over in all_runs(found)
        if found.get(key := f"{over}_over_{each.under}{each.suffix}") is not None
    ]


def _notes(report: Report) -> list[str]:
    """What went wrong, summed over all runs."""
    runs = all_runs(report.results).values()
    errors, preemptions, recomputed = (sum(run.get(key) or 0 for run in runs) for key in COUNTED)
    notes = [f"Errors: {errors}. Decode stalls and requests overtaken: {sum(map(incidents, runs))}."]
    notes.append(f"Preemptions: {preemptions:,}. Tokens recomputed: {recomputed:,}.")
    if cut := sum(run["is_cut"] for run in runs):
        notes.append(f"{cut} of the runs were broken off after {report.flags['max_seconds']:g} s.")
    return notes
