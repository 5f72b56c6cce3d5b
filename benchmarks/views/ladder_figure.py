"""The ladder as a picture: bars of speed beside the cost of a token against length. Introduced in phase 3.

Invariant: the picture brings its own background, so that it reads the same on a light page and on a dark one, and it
names model and machine, so that it can be passed on alone.
"""

import math
from pathlib import Path
from typing import Any, Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.report import Report
from benchmarks.views.ladder import figure as readable
from benchmarks.views.ladder import times, trials

PAPER, INK, QUIET, GRID = "#fbfaf6", "#22272e", "#626a76", "#e4e1d8"
FIRST, NEWEST = "#9aa1ab", "#0f766e"

# The page, in inches.
HEAD, FOOT, SIDE = 1.72, 0.66, 0.5
LINES_HEIGHT, ROW, WIDEST_ROW, BAR = 2.9, 0.62, 1.05, 0.3
LABEL_GAP = 0.2
ROW_WITH_FACTS = 0.9
MOST_LINEAR = 3
"""With more lines than this both axes are logarithmic, since all but the first lie close together."""


def save_figure(report: Report, path: Path) -> None:
    """Draw a report of `measure_ladder` as a PNG."""
    FigureCanvasAgg(draw(report)).print_png(path)


def draw(report: Report) -> Figure:
    """The figure: bars alone when no contexts were measured, otherwise bars and lines."""
    results, flags = report.results, report.flags
    contexts = [int(context) for context in next(iter(results.values()))["ms_per_token"]]
    body = max(LINES_HEIGHT if contexts else 0.0, ROW * len(results))
    width, height = 11.0 if contexts else 7.0, HEAD + body + (FOOT if contexts else 0.35)
    page = Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    colours = _colours(len(results))

    bottom = height - HEAD - body
    bars_width = 4.75 if contexts else width - 2 * SIDE
    bars = page.add_axes((SIDE / width, bottom / height, bars_width / width, body / height))
    _draw_bars(bars, results, colours, body)
    _title(bars, "Decode speed", f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, {trials(flags)}")
    if contexts:
        left, right = SIDE + bars_width + 0.75, 1.45
        lines = page.add_axes((left / width, bottom / height, (width - left - right) / width, body / height))
        _draw_lines(lines, results, contexts, colours, body)
        _title(lines, "Cost of one more token", "milliseconds, by the number of tokens before it")

    about = f"{report.machine_title}  ·  {flags['dtype']}  ·  {report.date[:10]}"
    page.text(SIDE / width, 1 - 0.3 / height, report.model["name"], c=INK, fontsize=16, fontweight="bold", va="top")
    page.text(SIDE / width, 1 - 0.63 / height, about, c=QUIET, fontsize=10.5, va="top")
    return page


def _draw_bars(axes: Axes, results: dict[str, dict[str, Any]], colours: list[str], body: float) -> None:
    speeds = [result["decode_tokens_per_second"] for result in results.values()]
    row = min(WIDEST_ROW, body / len(results))  # inches; the y axis counts rows downwards
    axes.barh(range(len(results)), speeds, height=BAR / row, color=colours)
    half = BAR / row / 2
    for index, ((number, result), speed) in enumerate(zip(results.items(), speeds, strict=True)):
        gain = f"   {times(result['speedup'])}" if index else ""
        weight = "bold" if index == len(results) - 1 else "normal"
        _write(axes, f"{readable(speed)} tok/s{gain}", (speed, index), (7, 0), INK, 11, "center", weight)
        _write(axes, f"{number}  {result['title']}", (0, index - half), (0, 4), INK, 10.5, "bottom")
        if row >= ROW_WITH_FACTS:
            first = f"first token {readable(result['time_to_first_token_ms'])} ms"
            facts = f"{result['tokens_computed']:,} tokens computed, {first}"
            _write(axes, facts, (0, index + half), (0, -4), QUIET, 9, "top")
    axes.set_xlim(0, max(speeds) * 1.5)
    top = -0.5 * BAR / row - 0.28 / row
    axes.set_ylim(top + body / row, top)
    axes.set_axis_off()


def _draw_lines(
    axes: Axes, results: dict[str, dict[str, Any]], contexts: list[int], colours: list[str], body: float
) -> None:
    axes.set_facecolor(PAPER)
    curves = {number: list(result["ms_per_token"].values()) for number, result in results.items()}
    for costs, colour in zip(curves.values(), colours, strict=True):
        axes.plot(contexts, costs, color=colour, lw=2.4, marker="o", ms=5.5, mec=PAPER, mew=1.2, clip_on=False)
    every = [cost for costs in curves.values() for cost in costs]
    if len(curves) > MOST_LINEAR:
        axes.set_yscale("log")
        axes.set_ylim(0.75 * min(every), 1.15 * max(every))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xscale("log")
        axes.set_xlim(0.85 * contexts[0], contexts[-1])
        ticks = contexts
    else:
        axes.set_ylim(0, 1.08 * max(every))
        axes.set_xlim(0, contexts[-1])
        ticks = [context for index, context in enumerate(contexts) if _has_room(contexts, index)]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda cost, _: f"{cost:,g}"))
    scale = math.log if len(curves) > MOST_LINEAR else float
    low, high = (scale(bound) for bound in axes.get_ylim())
    heights = [(scale(costs[-1]) - low) / (high - low) for costs in curves.values()]
    for number, costs, colour, height in zip(
        curves, curves.values(), colours, _spread(heights, LABEL_GAP / body), strict=True
    ):
        axes.annotate(
            f"{number}   {readable(costs[-1])} ms",
            (1, height),
            xycoords="axes fraction",
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=QUIET if colour == FIRST else colour,  # the bars' grey is too pale for letters
            fontsize=10.5,
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(which="both", colors=QUIET, labelsize=9.5, length=0)
    axes.grid(axis="y", color=GRID, lw=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.set_xlabel("tokens of context", color=QUIET, fontsize=10, labelpad=6)


def _write(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    offset: tuple[float, float],
    colour: str,
    size: float,
    align: Literal["center", "bottom", "top"],
    weight: str = "normal",
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
        fontweight=weight,
    )


def _title(axes: Axes, title: str, detail: str) -> None:
    """Two lines above the axes."""
    for text, rise, colour, size, weight in ((title, 27, INK, 12.5, "bold"), (detail, 12, QUIET, 10, "normal")):
        axes.annotate(
            text,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, rise),
            textcoords="offset points",
            color=colour,
            fontsize=size,
            fontweight=weight,
            annotation_clip=False,
        )


def _has_room(contexts: list[int], index: int) -> bool:
    """Whether a tick's label stands clear of the next one's on a linear axis."""
    return index == len(contexts) - 1 or contexts[index + 1] - contexts[index] >= 0.07 * contexts[-1]


def _spread(heights: list[float], gap: float) -> list[float]:
    """Heights moved upwards, in their order, until neighbours are at least ``gap`` apart."""
    placed = list(heights)
    lowest = 0.0
    for index in sorted(range(len(heights)), key=lambda i: heights[i]):
        placed[index] = max(heights[index], lowest)
        lowest = placed[index] + gap
    return placed


def _colours(count: int) -> list[str]:
    """Grey for the first rung, the accent for the newest, steps of one map between them."""
    if count == 1:
        return [NEWEST]
    between = [colormaps["plasma"](0.12 + 0.6 * index / max(1, count - 3)) for index in range(count - 2)]
    return [FIRST, *("#" + "".join(f"{round(255 * part):02x}" for part in rgba[:3]) for rgba in between), NEWEST]
