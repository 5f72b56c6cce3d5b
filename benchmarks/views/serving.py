"""The serving benchmark as a reader sees it: tables in the terminal and in Markdown. Introduced in phase 4.

Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from typing import Any

from rich.console import Console

from benchmarks.report import Report
from benchmarks.views.ladder import figure
from benchmarks.views.serving_memory import memory_notes, memory_tables
from benchmarks.views.table import NOTHING, Row, Shown, count, markdown_tables, percent, print_tables


def print_serving(report: Report, console: Console) -> None:
    print_tables(title(report), head(report), tables(report), notes(report), console)


def markdown(report: Report) -> str:
    return markdown_tables(title(report), f"{head(report)}; {report.date[:10]}.", tables(report), notes(report))


def title(report: Report) -> str:
    return f"Serving: {report.model['name']} on {report.machine_title}"


def head(report: Report) -> str:
    """What was run."""
    flags = report.flags
    text = f"greedy, {flags['dtype']}, batches of up to {flags['max_batch_size']}, seed {report.seed}"
    return f"{text}, demo size (no GPU)" if flags["is_demo_size"] else text


def tables(report: Report) -> list[Shown]:
    """Title, columns and rows of each table."""
    results, about = report.results, {name: entry["about"] for name, entry in report.flags["workloads"].items()}
    titles = {name: entry["title"] for name, entry in report.flags["workloads"].items()}
    found: list[Shown] = []
    for name, contenders in results.get("workloads", {}).items():
        heading = f"{titles[name]}: {about[name]}"
        found += [(heading, *_speeds(contenders)), (f"{titles[name]}: latencies (ms)", *_latencies(contenders))]
    for name, policies in results.get("policies", {}).items():
        rows = _latencies(policies, with_fairness=True)
        found.append((f"Policies on {titles[name]}: latencies (ms)", *rows))
    if loop := results.get("closed_loop"):
        heading = f"Closed loop: {about['backlog']}, median of {report.flags['trials']} trials in turns"
        found.append((heading, *_loop(loop)))
    if tail := results.get("tail"):
        rate = figure(tail["rate_requests_per_second"])
        heading = f"Tail: {len_of(tail)} Poisson requests at {rate} a second, {tail['load']} of what static can do"
        found.append((f"{heading} (ms)", *_latencies(_both(tail))))
    if together := results.get("together"):
        heading = f"{titles['together']}: {about['together']}, median of {report.flags['trials']} trials in turns"
        found.append((heading, *_speeds(together)))
    found += memory_tables(report)
    if overhead := results.get("http_overhead"):
        rows = _speeds({"engine": overhead["engine"], "http": overhead["http"]})
        found.append((f"{titles['streams']}: {about['streams']}, last of {report.flags['trials']} trials", *rows))
    if memory := _memory(report):
        found.append(("Memory (MB)", *memory))
    return found


def notes(report: Report) -> list[str]:
    """What the ratios say."""
    results, found = report.results, []
    if loop := results.get("closed_loop"):
        found.append(
            f"While requests wait, continuous batching gives {loop['continuous_over_static_saturated']:.2f}× the "
            f"tokens of static batching; over the whole trace, its end included, "
            f"{loop['continuous_over_static_output']:.2f}×."
        )
    if (tail := results.get("tail")) and tail["continuous_over_static_p99_request_latency"]:
        wait = tail["continuous_over_static_p99_queue_wait"]
        found.append(
            f"Of static batching's P99, continuous batching has {wait:.2f} of the queue wait and "
            f"{tail['continuous_over_static_p99_request_latency']:.2f} of the whole latency."
        )
    found += memory_notes(report)
    if overhead := results.get("http_overhead"):
        found.append(
            f"Over HTTP the engine gives {percent(overhead['http_over_engine'])} of its tokens (median of "
            f"{report.flags['trials']} trials; client processes: {overhead['client_processes']})."
        )
    incidents = sum(
        (result.get("decode_stalls") or 0) + (result.get("requests_overtaken") or 0) for result in all_runs(results)
    )
    errors = sum(result["num_errors"] for result in all_runs(results))
    preemptions, recomputed = (
        sum(result.get(key) or 0 for result in all_runs(results)) for key in ("preemptions", "tokens_recomputed")
    )
    found.append(f"Errors: {errors}. Starvation incidents (decode stalls and requests overtaken): {incidents}.")
    if preemptions:
        found.append(f"Preemptions: {preemptions:,}. Tokens recomputed: {recomputed:,}.")
    if cut := sum(result["is_cut"] for result in all_runs(results)):
        found.append(f"{cut} of the runs were broken off after {report.flags['max_seconds']:g} s.")
    return found


def all_runs(node: Any) -> list[dict[str, Any]]:
    """Every served trace below a node of the results."""
    if not isinstance(node, dict):
        return []
    if "num_errors" in node:
        return [node]
    return [run for child in node.values() for run in all_runs(child)]


def len_of(experiment: dict[str, Any]) -> int:
    """Requests of the traces of an experiment."""
    return int(all_runs(experiment)[0]["num_requests"])


def _both(experiment: dict[str, Any]) -> dict[str, Any]:
    return {name: experiment[name] for name in ("static", "continuous")}


def _speeds(runs: dict[str, Any]) -> tuple[Row, list[Row]]:
    columns = ["", "tokens/s", "gain", "requests/s", "places used", "steps", "forward passes", "tokens computed"]
    rows = [
        [
            run["title"],
            figure(run["output_tokens_per_second"]),
            NOTHING if run.get("gain") is None else f"{run['gain']:.2f}×",
            figure(run["requests_per_second"]),
            percent(run["slot_utilisation"]),
            *(count(run.get(key)) for key in ("steps", "forward_passes", "tokens_computed")),
        ]
        for run in runs.values()
    ]
    if not any("gain" in run for run in runs.values()):
        columns = [column for column in columns if column != "gain"]
        rows = [row[:2] + row[3:] for row in rows]
    return columns, rows


def _loop(loop: dict[str, Any]) -> tuple[Row, list[Row]]:
    columns = ["", "tokens/s while requests wait", "tokens/s, whole trace", "places used", "ms/step", "forward passes"]
    rows = [
        [
            run["title"],
            figure(run["saturated_tokens_per_second"]),
            figure(run["output_tokens_per_second"]),
            percent(run["slot_utilisation"]),
            figure(run["mean_step_ms"]),
            count(run["forward_passes"]),
        ]
        for run in all_runs(loop)
    ]
    return columns, rows


def _latencies(runs: dict[str, Any], with_fairness: bool = False) -> tuple[Row, list[Row]]:
    """Percentiles; of policies, which go by their names, fairness too."""
    kinds = {
        "queue_wait_ms": "queue wait",
        "time_to_first_token_ms": "first token",
        "inter_token_latency_ms": "between tokens",
        "request_latency_ms": "whole",
    }
    columns = ["P50 / P95 / P99", *kinds.values()]
    rows = [
        [
            name if with_fairness else run["title"],
            *(NOTHING if not run[key] else " / ".join(map(figure, run[key].values())) for key in kinds),
        ]
        for name, run in runs.items()
    ]
    if with_fairness:
        columns += ["tokens/s", "starved"]
        for row, run in zip(rows, runs.values(), strict=True):
            row += [figure(run["output_tokens_per_second"]), count(run["decode_stalls"] + run["requests_overtaken"])]
    return columns, rows


def _memory(report: Report) -> tuple[Row, list[Row]] | None:
    """Of each contender once."""
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for run in all_runs(report.results):
        if "memory_kv_bytes" in run:
            before = seen.get((run["title"], run["memory_kv_bytes"]))
            if before is None or (run["peak_activation_bytes"] or 0) > (before["peak_activation_bytes"] or 0):
                seen[run["title"], run["memory_kv_bytes"]] = run
    keys = ("memory_weights_bytes", "memory_kv_bytes", "memory_other_bytes", "peak_activation_bytes")
    rows = [
        [run["title"], *(NOTHING if run[key] is None else f"{run[key] / 1e6:,.1f}" for key in keys)]
        for run in seen.values()
    ]
    return (["", "weights", "KV memory", "other", "activations at the peak"], rows) if rows else None
