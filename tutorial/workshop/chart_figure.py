"""The learner's own ladder as a picture: bars for one request and for 16, and whose code ran.

Invariant: the picture brings its own background, says where to look, and names model, machine and what was compared, so
that it can be passed on alone.
"""

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.figure import FIRST, INK, NEWEST, PAPER, QUIET
from benchmarks.view import number
from shared.errors import ConfigError
from tutorial.workshop.chart import PersonalLadder, PersonalRung, Speeds

# The page, in inches.
WIDTH, SIDE, HEAD, FOOT = 10.0, 0.5, 1.75, 0.3
LABEL, BAR, GAP, NOTE, AFTER = 0.34, 0.26, 0.06, 0.2, 0.3
LETTERS = 118
"""Of a note's line."""
STEADY = 1.25
"""Trials that differ by more than this were disturbed; a ratio of theirs would be chance, and is not shown."""


def save(ladder: PersonalLadder, path: Path) -> None:
    """Draw the ladder as a PNG; ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(draw(ladder)).print_png(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file with --out.") from None


def draw(ladder: PersonalLadder) -> Figure:
    """The figure."""
    notes = [[line for note in told(rung) for line in textwrap.wrap(note, LETTERS)] for rung in ladder.rungs]
    rows = [_height(rung, lines) for rung, lines in zip(ladder.rungs, notes, strict=True)]
    height = HEAD + sum(rows) + FOOT
    page = Figure(figsize=(WIDTH, height), dpi=160, facecolor=PAPER)
    title = f"{ladder.model}: your ladder" if any(rung.own for rung in ladder.rungs) else f"{ladder.model}: ladder"
    about = f"{ladder.machine_title}  ·  {ladder.flags['dtype']}  ·  {ladder.date[:10]}"
    lines = [(title, 0.3, INK, 16, "bold"), (about, 0.63, QUIET, 10.5, "normal")]
    lines += [(line, 0.86 + 0.2 * n, QUIET, 9.5, "normal") for n, line in enumerate(said(ladder))]
    for text, top, colour, size, weight in lines:
        page.text(SIDE / WIDTH, 1 - top / height, text, c=colour, fontsize=size, fontweight=weight, va="top")
    half = (WIDTH - 2 * SIDE) / 2
    for place, (heading, name) in enumerate((("One request", "one"), ("16 at a time", "together"))):
        axes = page.add_axes(((SIDE + place * half) / WIDTH, FOOT / height, half / WIDTH, sum(rows) / height))
        speeds = [getattr(each, name) for rung in ladder.rungs for each in (rung.own, rung.reference) if each]
        axes.set_xlim(0, 2.1 * max(speeds))
        axes.set_ylim(sum(rows), 0)  # inches, downwards
        axes.set_axis_off()
        axes.text(0, -0.05, heading, color=QUIET, fontsize=10.5, fontweight="bold")
        top = 0.0
        for rung, words, row in zip(ladder.rungs, notes, rows, strict=True):
            _draw_rung(axes, rung, name, words if place == 0 else [], top, has_title=place == 0)
            top += row
    return page


def said(ladder: PersonalLadder) -> list[str]:
    """What was measured, and where to look, in lines."""
    flags = ladder.flags
    size = f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out"
    lines = [f"One request: {size}. 16 at a time: {flags['together']}. Median of {flags['trials']}, in turns."]
    if any(rung.own for rung in ladder.rungs):
        lines.append(
            "Where to look: green is your code, grey the reference; a green bar as long as the grey one is full marks."
        )
    return [*lines, "Phases 2 to 3.1 speed up one request; the later ones serve more at a time, on the right."]


def told(rung: PersonalRung) -> list[str]:
    """Whose code ran in a phase, and what speaks against taking its speeds at their word."""
    notes = []
    if rung.own is not None:
        notes.append(f"your code: {', '.join(rung.yours)}; the rest is the reference's")
    elif rung.missing:
        notes.append(f"not yours yet: {', '.join(rung.missing)} must pass `infer workshop check`")
    else:
        notes.append("the reference's: no exercise of this phase runs in this measurement")
    if rung.spread > STEADY:
        notes.append(f"the trials differ by up to {rung.spread:.1f}×, since the machine was busy, so no ratio is shown")
    return notes + ["with your code other tokens than the reference's"] * (not rung.is_equal)


def ratio(rung: PersonalRung, name: str) -> str:
    """The learner's speed over the reference's, where the trials can tell it from chance."""
    if rung.own is None or rung.spread > STEADY:
        return ""
    return f"{getattr(rung.own, name) / getattr(rung.reference, name):.2f}×"


def bars(rung: PersonalRung) -> list[tuple[str, Speeds]]:
    """Whose speeds a phase shows, the learner's first."""
    own = [] if rung.own is None else [("yours", rung.own)]
    return [*own, ("reference", rung.reference)]


def _height(rung: PersonalRung, notes: list[str]) -> float:
    return LABEL + (BAR + GAP) * len(bars(rung)) + NOTE * len(notes) + AFTER


def _draw_rung(axes: Axes, rung: PersonalRung, name: str, notes: list[str], top: float, *, has_title: bool) -> None:
    if has_title:
        axes.text(0, top + LABEL - 0.08, f"{rung.number}  {rung.title}", color=INK, fontsize=12, fontweight="bold")
    top += LABEL
    for whose, speeds in bars(rung):
        speed, label = getattr(speeds, name), f"yours   {ratio(rung, name)}" if whose == "yours" else whose
        axes.barh(top + BAR / 2, speed, height=BAR, color=NEWEST if whose == "yours" else FIRST)
        axes.annotate(
            f"{number(speed)} tok/s   {label}",
            (speed, top + BAR / 2),
            xytext=(7, 0),
            textcoords="offset points",
            color=INK,
            fontsize=10,
            fontweight="bold" if whose == "yours" else "normal",
            va="center",
        )
        top += BAR + GAP
    for line in notes:
        axes.text(0, top + NOTE - 0.06, line, color=QUIET, fontsize=9)
        top += NOTE
