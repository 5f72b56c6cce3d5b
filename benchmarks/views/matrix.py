"""The matrix as a reader sees it: tables, and bars. Introduced in phase 4.

Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.report import Report
from benchmarks.views.ladder import figure
from benchmarks.views.ladder_figure import INK, PAPER, QUIET
from benchmarks.views.serving import head
from benchmarks.views.serving_figure import FOOT, GROUP_GAP, HEAD, ROW, SIDE, draw_groups
from benchmarks.views.table import NOTHING, Shown, markdown_tables, print_tables


def print_matrix(report: Report, console: Console) -> None:
    print_tables(title(report), head(report), tables(report), notes(report), console)


def markdown(report: Report) -> str:
    return markdown_tables(title(report), f"{head(report)}; {report.date[:10]}.", tables(report), notes(report))


def title(report: Report) -> str:
    return f"Matrix: {report.model['name']} on {report.machine_title}"


def tables(report: Report) -> list[Shown]:
    """A table for each workload: throughput, both gains, and the latency that a reader feels."""
    columns = ["", "tokens/s", "over the first", "over the phase before", "first token P99 (ms)", "between tokens P99"]
    found: list[Shown] = []
    for name, workload in report.flags["workloads"].items():
        rows = []
        for row, result in report.results.items():
            cell = result[name]
            rows.append(
                [
                    (row if result["settings"] else result["title"]) + (" *" if cell["is_cut"] else ""),
                    figure(cell["output_tokens_per_second"]),
                    *(_gain(cell[key]) for key in ("gain_over_first", "gain_over_previous")),
                    *(_p99(cell[key]) for key in ("time_to_first_token_ms", "inter_token_latency_ms")),
                ]
            )
        found.append((f"{workload['title']}: {workload['about']}", columns, rows))
    return found


def notes(report: Report) -> list[str]:
    workloads = report.flags["workloads"]
    cut = sum(result[name]["is_cut"] for result in report.results.values() for name in workloads)
    return [f"* broken off after {report.flags['max_seconds']:g} s"] if cut else []


def save_figure(report: Report, path: Path) -> None:
    """Draw a report of `run_matrix` as a PNG: a group of bars for each workload."""
    groups = [
        (
            workload["title"],
            [
                (row if result["settings"] else result["title"], result[name]["output_tokens_per_second"])
                for row, result in report.results.items()
            ],
        )
        for name, workload in report.flags["workloads"].items()
    ]
    body = ROW * (sum(len(bars) for _, bars in groups) + GROUP_GAP * len(groups))
    width, height = 9.0, HEAD + body + FOOT / 2
    page = Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    axes = page.add_axes((SIDE / width, FOOT / 2 / height, 1 - 2 * SIDE / width, body / height))
    draw_groups(axes, groups, "Output tokens a second")
    page.text(SIDE / width, 1 - 0.3 / height, report.model["name"], c=INK, fontsize=16, fontweight="bold", va="top")
    about = f"{report.machine_title}  ·  {head(report)}  ·  {report.date[:10]}"
    page.text(SIDE / width, 1 - 0.64 / height, about, c=QUIET, fontsize=9.5, va="top")
    FigureCanvasAgg(page).print_png(path)


def _gain(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def _p99(percentiles: dict[str, float] | None) -> str:
    return NOTHING if percentiles is None else figure(percentiles["p99"])
