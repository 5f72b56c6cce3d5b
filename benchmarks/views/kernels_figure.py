"""The kernel benchmark as a picture: each kernel's share of the ceiling, beside eager PyTorch and compiled.

Introduced in phase 3.1. Invariant: that of :mod:`benchmarks.views.ladder_figure`, whose page it shares: it brings its
own background and names model and machine. Shares are bytes that must move over the time taken, so every bar of a
kernel counts the same bytes.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.report import Report
from benchmarks.views.kernels import DEMO, rows_of
from benchmarks.views.ladder import figure as readable
from benchmarks.views.ladder_figure import FIRST, GRID, INK, NEWEST, PAPER, QUIET

BARS = (("ours", "time_us", NEWEST), ("compiled", "compiled_us", "#c2925a"), ("eager", "eager_us", FIRST))
WIDTH, HEAD, FOOT, ROW = 9.0, 1.35, 0.55, 0.56  # inches
LEFT, RIGHT = 2.45, 0.75
BAR = 0.26  # of a row
BEHIND = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.4}


def save_figure(report: Report, path: Path) -> None:
    """Draw a report of `measure_kernels` as a PNG."""
    FigureCanvasAgg(draw(report)).print_png(path)


def draw(report: Report) -> Figure:
    """Three bars for each kernel at the fewest rows measured, and for attention at each context."""
    rows = chosen_rows(report)
    height = HEAD + ROW * len(rows) + FOOT
    page = Figure(figsize=(WIDTH, height), dpi=160, facecolor=PAPER)
    axes = page.add_axes((LEFT / WIDTH, FOOT / height, (WIDTH - LEFT - RIGHT) / WIDTH, ROW * len(rows) / height))
    _draw_bars(axes, rows)
    flags = report.flags
    about = f"{report.machine_title}  ·  {flags['dtype']}  ·  {report.date[:10]}"
    if flags["is_demo_size"]:
        about += f"  ·  {DEMO.partition(':')[0]}"
    title = f"{report.model['name']}: share of the memory's ceiling"
    page.text(0.3 / WIDTH, 1 - 0.26 / height, title, c=INK, fontsize=15, fontweight="bold", va="top")
    page.text(0.3 / WIDTH, 1 - 0.6 / height, about, c=QUIET, fontsize=10, va="top")
    for place, (name, _, colour) in enumerate(BARS):
        x, y = (LEFT + place * 1.15) / WIDTH, 1 - 0.98 / height
        page.text(x, y, f"■ {name}", c=colour, fontsize=10.5, fontweight="bold", va="top")
    return page


def chosen_rows(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """Label and row of what is drawn."""
    fewest = str(min(report.flags["rows"]))
    chosen = []
    for kernel, size, row in rows_of(report):
        if kernel.startswith("decode_attention"):
            chosen.append((f"{kernel.removeprefix('decode_')} {int(size):,}", row))
        elif size == fewest:
            chosen.append((kernel, row))
    return chosen


def share(row: dict[str, Any], key: str) -> float | None:
    """Of the ceiling, for the time under ``key``."""
    return None if row[key] is None else row["floor_us"] / row[key]


def _draw_bars(axes: Axes, rows: list[tuple[str, dict[str, Any]]]) -> None:
    axes.set_facecolor(PAPER)
    for index, (label, row) in enumerate(rows):
        for place, (name, key, colour) in enumerate(BARS):
            reached = share(row, key)
            if reached is None:
                continue
            y = index + (place - 1) * BAR
            axes.barh(y, reached, height=0.85 * BAR, color=colour)
            text = f"{100 * reached:.0f} %  {readable(row[key])} µs" if name == "ours" else f"{readable(row[key])} µs"
            axes.annotate(
                text, (reached, y), (4, 0), textcoords="offset points", va="center", c=QUIET, fontsize=7.5, bbox=BEHIND
            )
        axes.annotate(
            label, (0, index), (-8, 0), textcoords="offset points", va="center", ha="right", c=INK, fontsize=10
        )
    axes.axvline(1.0, color=INK, lw=1.0, ls=(0, (4, 3)))
    axes.set_xlim(0, 1.12)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "ceiling"])
    axes.set_yticks([])
    axes.tick_params(colors=QUIET, labelsize=9, length=0)
    axes.grid(axis="x", color=GRID, lw=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
