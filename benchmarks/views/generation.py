"""The generation benchmark as a reader sees it: tables in the terminal and in Markdown. Introduced in phase 3.1.

Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from typing import Any

from rich.console import Console

from benchmarks.report import Report
from benchmarks.view import duration, quantity
from benchmarks.views.ladder import figure, trials
from benchmarks.views.table import NOTHING, Row, Shown, markdown_tables, percent, print_tables


def print_generation(report: Report, console: Console) -> None:
    """Speeds with their share of the limit, work on the device where there is a GPU, and memory."""
    title = f"Generation: {report.model['name']} · {report.machine_title}"
    print_tables(title, head(report), tables(report), notes(report), console)


def markdown(report: Report) -> str:
    """The same as Markdown, for a report's folder or a document."""
    title = f"Generation: {report.model['name']} on {report.machine_title}"
    return markdown_tables(title, f"{head(report)}; {report.date[:10]}.", tables(report), notes(report))


def head(report: Report) -> str:
    """What was run."""
    flags = report.flags
    text = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, greedy, {flags['dtype']}, {trials(flags)}"
    return f"{text}, demo size (no GPU)" if flags["is_demo_size"] else text


def tables(report: Report) -> list[Shown]:
    """Title, columns and rows of each table."""
    results = {name: report.results[name] for name in report.flags["contenders"]}
    found = [("Speed", *_speed(results)), ("Memory", *_memory(results))]
    if any(result["kernel_us_per_token"] is not None for result in results.values()):
        found.insert(1, ("Work on the GPU for one token", *_work(results)))
    return found


def notes(report: Report) -> list[str]:
    """The limit, what it follows from, and who is faster than whom."""
    limit, bandwidth = report.results["limit"], 1e9 * report.results["ceilings"]["read_gb_per_second"]
    needed = quantity(limit["weights_bytes_per_token"] + limit["kv_bytes_per_token"], "B")
    least, most = duration(limit["us_per_token"] / 1e6), figure(limit["tokens_per_second"])
    found = [
        f"The limit: a token reads {needed} of weights, keys and values; at the {quantity(bandwidth, 'B/s')} measured "
        f"in this run that takes {least}, so {most} tokens/s."
    ]
    ratios = (f"{pair.replace('_', ' ')} {ratio:.2f}×" for pair, ratio in report.results["ratios"].items())
    return [*found, f"Decode speed: {', '.join(ratios)}."] if report.results["ratios"] else found


def _speed(results: dict[str, dict[str, Any]]) -> tuple[Row, list[Row]]:
    columns = ["", "first token (ms)", "decode (tok/s)", "ms/token", "share of limit", "tokens computed", "same tokens"]
    rows = [
        [
            result["title"],
            figure(result["time_to_first_token_ms"]),
            figure(result["decode_tokens_per_second"]),
            figure(result["ms_per_token"]),
            percent(result["share_of_bandwidth"]),
            f"{result['tokens_computed']:,}",
            f"{result['equal_tokens']} of {result['compared_tokens']}",
        ]
        for result in results.values()
    ]
    return columns, rows


def _work(results: dict[str, dict[str, Any]]) -> tuple[Row, list[Row]]:
    columns = ["", "kernels (µs)", "share of limit", "kernels", "copies", "launched by the host", "ours"]
    keys = ("kernels_per_token", "copies_per_token", "host_launches_per_token", "own_launches_per_token")
    rows = [
        [
            result["title"],
            _optional(result["kernel_us_per_token"]),
            percent(result["kernel_share_of_bandwidth"]),
            *(_optional(result[key]) for key in keys),
        ]
        for result in results.values()
    ]
    return columns, rows


def _memory(results: dict[str, dict[str, Any]]) -> tuple[Row, list[Row]]:
    columns = ["", "weights (MB)", "KV cache (MB)", "other (MB)"]
    keys = ("memory_weights_bytes", "memory_kv_bytes", "memory_other_bytes")
    rows = [
        [result["title"], *(NOTHING if result[key] is None else f"{result[key] / 1e6:,.1f}" for key in keys)]
        for result in results.values()
    ]
    return columns, rows


def _optional(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
