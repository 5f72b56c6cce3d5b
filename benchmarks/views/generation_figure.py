"""The generation benchmark as a picture: speed below the limit, and where a token's time goes. Introduced in phase 3.1.

Invariant: the picture brings its own background and names model and machine, like the ladder's; the limit it shows is
the one in the report.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.report import Report
from benchmarks.views.generation import head
from benchmarks.views.ladder import figure as readable
from benchmarks.views.ladder_figure import FIRST, INK, NEWEST, PAPER, QUIET
from benchmarks.views.table import percent

READING, KERNELS, WAITING = "#0f766e", "#7dbcb4", "#d9d5c9"
THEIRS = "#c9a227"
HEAD, FOOT, SIDE, ROW, BAR = 1.5, 0.6, 0.5, 0.72, 0.34  # inches; the y axis counts rows downwards


def save_figure(report: Report, path: Path) -> None:
    """Draw a report of `measure_generation` as a PNG."""
    FigureCanvasAgg(draw(report)).print_png(path)


def draw(report: Report) -> Figure:
    """Bars of speed; beside them, where kernels were timed, a token's time in its parts."""
    results = {name: report.results[name] for name in report.flags["contenders"]}
    has_kernels = any(result["kernel_us_per_token"] is not None for result in results.values())
    width, body = 11.0 if has_kernels else 7.5, ROW * len(results)
    height = HEAD + body + FOOT
    page = Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    bars_width = 5.2 if has_kernels else width - 2 * SIDE
    speeds = page.add_axes((SIDE / width, FOOT / height, bars_width / width, body / height))
    _draw_speeds(speeds, results, report.results["limit"]["tokens_per_second"])
    if has_kernels:
        left = SIDE + bars_width + 0.5
        times = page.add_axes((left / width, FOOT / height, (width - left - SIDE) / width, body / height))
        _draw_times(times, results, report.results["limit"]["us_per_token"] / 1e3)
    page.text(SIDE / width, 1 - 0.3 / height, report.model["name"], c=INK, fontsize=16, fontweight="bold", va="top")
    about = f"{report.machine_title}  ·  {head(report)}  ·  {report.date[:10]}"
    page.text(SIDE / width, 1 - 0.66 / height, about, c=QUIET, fontsize=9.5, va="top")
    return page


def _draw_speeds(axes: Axes, results: dict[str, dict[str, Any]], limit: float) -> None:
    ours = [name for name in results if not name.startswith("transformers")]
    for row, (name, result) in enumerate(results.items()):
        speed = result["decode_tokens_per_second"]
        colour = THEIRS if name not in ours else NEWEST if name == ours[-1] else FIRST
        axes.barh(row, speed, height=BAR / ROW, color=colour)
        label = f"{readable(speed)} tok/s   {percent(result['share_of_bandwidth'])}"
        _write(axes, label, (speed, row), (6, 0), INK, 10.5, "center")
        _write(axes, result["title"], (0, row - BAR / ROW / 2), (0, 3), INK, 9.5, "bottom")
    axes.axvline(limit, color=INK, lw=1, ls=(0, (4, 3)))
    _write(axes, f"limit {readable(limit)}", (limit, len(results) - 0.55), (-4, -10), INK, 9, "top", "right")
    axes.set_xlim(0, 1.02 * max(limit, *(1.5 * result["decode_tokens_per_second"] for result in results.values())))
    _finish(axes, len(results), "Decode speed, and its share of the limit")


def _draw_times(axes: Axes, results: dict[str, dict[str, Any]], floor_ms: float) -> None:
    """Reading at the measured bandwidth, the rest of the kernels' time, and the time in which no kernel ran."""
    for row, result in enumerate(results.values()):
        total = result["ms_per_token"]
        if result["kernel_us_per_token"] is None:
            continue
        kernels = min(total, result["kernel_us_per_token"] / 1e3)
        start = 0.0
        for end, colour in ((min(floor_ms, kernels), READING), (kernels, KERNELS), (total, WAITING)):
            axes.barh(row, end - start, left=start, height=BAR / ROW, color=colour)
            start = end
        _write(axes, f"{readable(total)} ms", (total, row), (6, 0), INK, 10.5, "center")
    axes.set_xlim(0, 1.3 * max(result["ms_per_token"] for result in results.values()))
    _finish(axes, len(results), "One token: ")
    offset = 66.0  # points, along the title's line
    for label, colour in (("reading", READING), ("other kernel time", KERNELS), ("no kernel runs", "#8f8a7c")):
        _write(axes, f"■ {label}", (0, -0.5), (offset, 15), colour, 9, "bottom")
        offset += 16 + 5.4 * len(label)


def _write(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    size: float,
    align: Any,
    side: Any = "left",
) -> None:
    """Text beside a place in the axes' own units, ``offset`` in points."""
    axes.annotate(
        text,
        place,
        xytext=offset,
        textcoords="offset points",
        color=colour,
        fontsize=size,
        va=align,
        ha=side,
        annotation_clip=False,
    )


def _finish(axes: Axes, rows: int, title: str) -> None:
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_axis_off()
    _write(axes, title, (0, -0.5), (0, 14), INK, 11.5, "bottom")
