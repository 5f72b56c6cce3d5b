"""The serving benchmark as a picture: throughput of each workload, and latency percentiles. Introduced in phase 4.

Invariant: the picture brings its own background and names model and machine, like the ladder's.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.report import Report
from benchmarks.views.ladder import figure as readable
from benchmarks.views.ladder_figure import FIRST, GRID, INK, NEWEST, PAPER, QUIET
from benchmarks.views.serving import all_runs, head

COLOURS = (
    FIRST,
    "#c9a227",
    "#7dbcb4",
    NEWEST,
    "#4f6d9a",
    "#8a5a83",
    "#6b8e4e",
    "#b07d62",
    "#9c6b8f",
    "#5b8fa8",
    "#a89f68",
    "#708090",
)
HEAD, FOOT, SIDE, ROW, PANEL, POINTS = 1.35, 0.6, 0.5, 0.3, 6.4, 4.6  # inches
GROUP_GAP = 0.8  # rows between two groups of bars
LATENCIES = {
    "queue_wait_ms": "queue wait",
    "time_to_first_token_ms": "first token",
    "inter_token_latency_ms": "between tokens",
    "request_latency_ms": "whole",
}


def save_figure(report: Report, path: Path) -> None:
    """Draw a report of `measure_serving` as a PNG."""
    FigureCanvasAgg(draw(report)).print_png(path)


def draw(report: Report) -> Figure:
    """Bars of throughput, beside them the percentiles of the experiment that tells most about latency."""
    groups = throughput_groups(report)
    subject, runs = latency_runs(report)
    num_rows = sum(len(bars) for _, bars in groups) + GROUP_GAP * len(groups)
    body = max(POINTS + 1, ROW * num_rows)
    width, height = 2 * PANEL + 2 * SIDE, HEAD + body + FOOT
    page = Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    bars = page.add_axes((SIDE / width, FOOT / height, (PANEL - 0.5) / width, body / height))
    draw_groups(bars, groups, "Output tokens a second")
    right = SIDE + PANEL + 0.45
    bottom = FOOT + body - POINTS - 0.2
    points = page.add_axes((right / width, bottom / height, (width - right - SIDE) / width, POINTS / height))
    _draw_latencies(points, subject, runs)
    page.text(SIDE / width, 1 - 0.3 / height, report.model["name"], c=INK, fontsize=16, fontweight="bold", va="top")
    about = f"{report.machine_title}  ·  {head(report)}  ·  {report.date[:10]}"
    page.text(SIDE / width, 1 - 0.64 / height, about, c=QUIET, fontsize=9.5, va="top")
    return page


def throughput_groups(report: Report) -> list[tuple[str, list[tuple[str, float]]]]:
    """A title for each group of bars, and (contender, tokens a second) for each bar."""
    titles = {name: entry["title"] for name, entry in report.flags["workloads"].items()}
    results, groups = report.results, []
    for kind in ("workloads", "policies"):
        if kind == "policies" and "workloads" in results:
            continue
        for name, runs in results.get(kind, {}).items():
            groups.append((titles[name], [(run["title"], run["output_tokens_per_second"]) for run in runs.values()]))
    if loop := results.get("closed_loop"):
        bars = [(run["title"], run["saturated_tokens_per_second"]) for run in all_runs(loop)]
        groups.append((f"{titles['backlog']}", bars))
    if capacity := results.get("capacity"):
        bars = [(run["title"], run["saturated_tokens_per_second"]) for run in all_runs(capacity)]
        groups.append((f"{capacity['kv_tokens']:,} tokens of KV memory for each", bars))
    if whole := results.get("whole_step"):
        bars = [(run["title"], run["tokens_per_second_median"]) for run in all_runs(whole)]
        groups.append(("Whole step, memory for all", bars))
    for key, name in (("together", "together"), ("http_overhead", "streams")):
        if key in results:
            bars = [(run["title"], run["output_tokens_per_second"]) for run in all_runs(results[key])]
            groups.append((titles[name], bars))
    return groups


def latency_runs(report: Report) -> tuple[str, dict[str, Any]]:
    """The tail where it was measured, else W2, else whatever was."""
    results = report.results
    if tail := results.get("tail"):
        rate = readable(tail["rate_requests_per_second"])
        return f"Tail: Poisson, {rate} requests a second", {name: tail[name] for name in ("static", "continuous")}
    titles = {name: entry["title"] for name, entry in report.flags["workloads"].items()}
    for kind in ("workloads", "policies"):
        if kind in results:
            return titles["w2"], results[kind]["w2"]
    return "Latencies", {run["title"]: run for run in all_runs(results)}


def draw_groups(axes: Axes, groups: list[tuple[str, list[tuple[str, float]]]], title: str) -> None:
    """Horizontal bars, group by group downwards, each with its figure and its name."""
    most = max((speed for _, bars in groups for _, speed in bars), default=1.0) or 1.0
    names = list(dict.fromkeys(name for _, bars in groups for name, _ in bars))
    row = 0.0
    for heading, bars in groups:
        axes.annotate(heading, (0, row), color=INK, fontsize=10.5, fontweight="bold", va="center")
        row += GROUP_GAP
        for name, speed in bars:
            axes.barh(row, speed, height=0.62, color=COLOURS[names.index(name) % len(COLOURS)])
            axes.annotate(
                f"{readable(speed)}  {name}",
                (speed, row),
                xytext=(6, 0),
                textcoords="offset points",
                color=INK,
                fontsize=9,
                va="center",
                annotation_clip=False,
            )
            row += 1
    axes.set_xlim(0, 1.9 * most)
    axes.set_ylim(row - 0.3, -0.7)
    axes.set_axis_off()
    axes.set_title(title, loc="left", color=QUIET, fontsize=10, pad=8)


def _draw_latencies(axes: Axes, subject: str, runs: dict[str, Any]) -> None:
    """A line from P50 to P99 for each kind of latency and contender, a point at P50, P95 and P99."""
    axes.set_facecolor(PAPER)
    kinds = [kind for kind in LATENCIES if any(run[kind] and run[kind]["p99"] > 0 for run in runs.values())]
    step = 0.8 / max(1, len(runs))
    for place, run in enumerate(runs.values()):
        colour = COLOURS[(place + 2 if len(runs) == 2 else place) % len(COLOURS)]
        for column, kind in enumerate(kinds):
            if not run[kind]:
                continue
            x = column + (place - (len(runs) - 1) / 2) * step
            values = [max(value, 1e-3) for value in run[kind].values()]
            label = run["title"] if column == 0 else None
            axes.plot([x] * len(values), values, color=colour, lw=2, marker="o", ms=5, mec=PAPER, label=label)
            axes.annotate(
                readable(values[-1]),
                (x, values[-1]),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                color=INK,
                fontsize=8,
            )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.margins(y=0.12)
    axes.set_xlim(-0.6, max(1, len(kinds)) - 0.4)
    axes.set_xticks(range(len(kinds)), [LATENCIES[kind] for kind in kinds])
    axes.tick_params(which="both", colors=QUIET, labelsize=9.5, length=0)
    axes.grid(axis="y", color=GRID, lw=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.set_title(f"{subject}: milliseconds at P50, P95 and P99", loc="left", color=QUIET, fontsize=10, pad=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False, fontsize=9, labelcolor=INK)
