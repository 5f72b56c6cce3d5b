"""The learner's own ladder as a picture: two bars a phase, and whose code ran in the first.

Invariant: the picture brings its own background and names model, machine and what was compared, so that it can be
passed on alone.
"""

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.figure import FIRST, INK, NEWEST, PAPER, QUIET
from benchmarks.view import number
from shared.errors import ConfigError
from tutorial.workshop.chart import PersonalLadder, PersonalRung

# The page, in inches.
WIDTH, SIDE, HEAD, FOOT = 8.0, 0.5, 1.3, 0.3
LABEL, BAR, GAP, NOTE, AFTER = 0.34, 0.26, 0.06, 0.2, 0.3
LETTERS = 92
"""Of a note's line."""
STEADY = 1.25
"""Trials that differ by more than this were disturbed."""


def save(ladder: PersonalLadder, path: Path) -> None:
    """Draw the ladder as a PNG; ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(draw(ladder)).print_png(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file with --out.") from None


def draw(ladder: PersonalLadder) -> Figure:
    """The figure."""
    notes = [_notes(rung, ladder) for rung in ladder.rungs]
    rows = [_height(rung, lines) for rung, lines in zip(ladder.rungs, notes, strict=True)]
    height = HEAD + sum(rows) + FOOT
    page = Figure(figsize=(WIDTH, height), dpi=160, facecolor=PAPER)
    title = f"{ladder.model}: your ladder" if any(rung.yours for rung in ladder.rungs) else f"{ladder.model}: ladder"
    about = f"{ladder.machine_title}  ·  {ladder.flags['dtype']}  ·  {ladder.date[:10]}"
    for text, top, colour, size, weight in (
        (title, 0.3, INK, 16, "bold"),
        (about, 0.63, QUIET, 10.5, "normal"),
        (said(ladder), 0.86, QUIET, 10.5, "normal"),
    ):
        page.text(SIDE / WIDTH, 1 - top / height, text, c=colour, fontsize=size, fontweight=weight, va="top")
    axes = page.add_axes((SIDE / WIDTH, FOOT / height, 1 - 2 * SIDE / WIDTH, sum(rows) / height))
    axes.set_xlim(0, 1.5 * max(speed for rung in ladder.rungs for speed in (rung.own_speed or 0, rung.reference_speed)))
    axes.set_ylim(sum(rows), 0)  # inches, downwards
    axes.set_axis_off()
    top = 0.0
    for rung, lines, row in zip(ladder.rungs, notes, rows, strict=True):
        _draw_rung(axes, rung, lines, top)
        top += row
    return page


def said(ladder: PersonalLadder) -> str:
    """What was measured, in one line."""
    flags = ladder.flags
    turns = ", your code and the reference taking turns" if any(rung.yours for rung in ladder.rungs) else ""
    size = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out"
    return f"Decode speed: {size}, median of {flags['trials']}{turns}"


def whose(rung: PersonalRung) -> list[str]:
    """Whose code ran in a phase, in words: the learner's exercises, and those where the reference ran."""
    parts = [("your code", rung.yours), ("reference", rung.reference)]
    return [f"{name}: {', '.join(numbers)}" for name, numbers in parts if numbers]


def doubts(rung: PersonalRung) -> list[str]:
    """What speaks against taking a phase's speeds at their word."""
    busy = f"the trials differ by up to {rung.spread:.1f}×: the machine did other things as well"
    return [busy] * (rung.spread > STEADY) + ["with your code other tokens than the first phase's"] * (
        not rung.is_equal
    )


def _notes(rung: PersonalRung, ladder: PersonalLadder) -> list[str]:
    unchecked = [number for number in rung.yours if number in ladder.unchecked]
    parts = [*whose(rung), *doubts(rung)]
    parts += [f"tests not passed: {', '.join(unchecked)}"] if unchecked else []
    return [line for part in parts for line in textwrap.wrap(part, LETTERS)]


def _height(rung: PersonalRung, notes: list[str]) -> float:
    bars = BAR if rung.own_speed is None else 2 * BAR + GAP
    return LABEL + bars + GAP + NOTE * len(notes) + AFTER


def _draw_rung(axes: Axes, rung: PersonalRung, notes: list[str], top: float) -> None:
    axes.text(0, top + LABEL - 0.08, f"{rung.number}  {rung.title}", color=INK, fontsize=12, fontweight="bold")
    top += LABEL
    bars = [(rung.reference_speed, FIRST, "reference", "normal")]
    if rung.own_speed is not None:
        bars.insert(0, (rung.own_speed, NEWEST, f"yours   {rung.ratio:.2f}×", "bold"))
    for speed, colour, name, weight in bars:
        axes.barh(top + BAR / 2, speed, height=BAR, color=colour)
        axes.annotate(
            f"{number(speed)} tok/s   {name}",
            (speed, top + BAR / 2),
            xytext=(7, 0),
            textcoords="offset points",
            color=INK,
            fontsize=10.5,
            fontweight=weight,
            va="center",
        )
        top += BAR + GAP
    for line in notes:
        axes.text(0, top + NOTE - 0.06, line, color=QUIET, fontsize=9)
        top += NOTE
