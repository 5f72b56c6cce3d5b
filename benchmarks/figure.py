"""The panels of a view as a picture. Introduced in phase 3. Invariant: a picture has its own background and names the
model and the machine, so that it can be passed on by itself.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from PIL import Image

from benchmarks.view import Bars, Lines, View, number

PAPER, INK, QUIET, GRID = "#fbfaf6", "#22272e", "#626a76", "#e4e1d8"
FIRST, NEWEST = "#9aa1ab", "#0f766e"
COLOURS = {"ours": NEWEST, "first": FIRST, "peer": "#c9a227", "compiled": "#c2925a"}
LINES = (FIRST, "#c9a227", "#7dbcb4", "#4f6d9a", "#8a5a83", "#6b8e4e", "#b07d62", "#5b8fa8", "#a89f68", NEWEST)

HEAD, FOOT, SIDE, GAP = 1.5, 0.7, 0.5, 0.9  # inches
PANEL, LEAST, ROW = 5.2, 3.2, 0.42
GROUP_ROWS = 0.9
Point = tuple[float, float]


def save_figure(view: View, path: Path) -> None:
    """Draw a view's panels, side by side, as a PNG with a palette, which is a third of the size of one without."""
    canvas = FigureCanvasAgg(draw(view))
    canvas.draw()
    save_with_palette(Image.fromarray(np.asarray(canvas.buffer_rgba())), path)


def save_with_palette(picture: Image.Image, path: Path) -> None:
    """Save as a PNG of 256 colours; rare colours are kept (maximum coverage), and common ones are made exact
    (k-means)."""
    method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    picture.convert("RGB").quantize(256, method=method, kmeans=1, dither=dither).save(path, optimize=True)


def draw(view: View) -> Figure:
    """The page of a view."""
    panels = view.panels
    body = max(LEAST, *(ROW * _rows(panel) for panel in panels if isinstance(panel, Bars)), 0.0)
    width = 2 * SIDE + PANEL * len(panels) + GAP * (len(panels) - 1)
    width, height = max(width, 7.5), HEAD + body + FOOT
    page = Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    panel_width = (width - 2 * SIDE - GAP * (len(panels) - 1)) / len(panels)
    for place, panel in enumerate(panels):
        left = (SIDE + place * (panel_width + GAP)) / width
        axes = page.add_axes((left, FOOT / height, panel_width / width, body / height))
        if isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_lines(axes, panel)
        axes.set_title(panel.title, loc="left", color=INK, fontsize=11.5, pad=10)
    page.text(SIDE / width, 1 - 0.3 / height, view.title, c=INK, fontsize=15, fontweight="bold", va="top")
    for index, line in enumerate(view.subtitles[:2]):
        page.text(SIDE / width, 1 - (0.62 + 0.2 * index) / height, line, c=QUIET, fontsize=9.5, va="top")
    return page


def _rows(panel: Bars) -> float:
    return sum(len(bars) + (GROUP_ROWS if heading else 0) for heading, bars in panel.groups)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    row, longest = 0.0, panel.limit[0] if panel.limit else 0.0
    for heading, bars in panel.groups:
        if heading:
            _write(axes, heading, (0, row), (0, 0), INK, 10.5, fontweight="bold")
            row += GROUP_ROWS
        for bar in bars:
            axes.barh(row, bar.length, height=0.62, color=COLOURS[bar.colour])
            longest = max(longest, bar.length)
            ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # the line of the limit does not cross it
            _write(axes, f"{bar.text}  {bar.label}", (bar.length, row), (6, 0), INK, 9, bbox=ground)
            row += 1
    if panel.limit:
        axes.vlines(panel.limit[0], -0.6, row - 0.4, color=INK, lw=1, ls=(0, (4, 3)))
        _write(axes, panel.limit[1], (panel.limit[0], row - 0.4), (-4, -8), QUIET, 9, ha="right")
    axes.set_xlim(0, 1.9 * (longest or 1.0))
    axes.set_ylim(max(row - 0.3, LEAST / ROW), -0.7)  # a few bars are no thicker than many
    axes.set_axis_off()


def _draw_lines(axes: Axes, panel: Lines) -> None:
    axes.set_facecolor(PAPER)
    for index, (name, values) in enumerate(panel.lines):
        colour = NEWEST if index == len(panel.lines) - 1 else LINES[index % (len(LINES) - 1)]
        points = [(x, y) for x, y in zip(panel.x, values, strict=True) if y is not None]
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, lw=2.2, marker="o", ms=5, mec=PAPER, label=f"{name}  {number(ys[-1])}")
        if panel.curves:
            axes.plot(panel.x, panel.curves[index], color=colour, lw=1.2, ls=(0, (4, 3)))  # type: ignore[arg-type]
            axes.lines[-2].set_linestyle("none")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks(panel.x, [f"{x:g}" for x in panel.x])
    axes.tick_params(which="both", colors=QUIET, labelsize=9.5, length=0)
    axes.grid(axis="y", color=GRID, lw=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    if panel.lines:
        axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=INK)


def _write(axes: Axes, said: str, point: Point, offset: Point, colour: str, size: float, **more: Any) -> None:
    """Text next to a point in the axes' own units, ``offset`` in points."""
    at: dict[str, Any] = {"va": "center", "ha": "left", "textcoords": "offset points", "annotation_clip": False} | more
    axes.annotate(said, point, offset, color=colour, fontsize=size, **at)
