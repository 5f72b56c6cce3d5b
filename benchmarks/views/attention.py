"""The attention benchmark as a reader sees it: a table in the terminal, and Markdown. Introduced in phase 6.1.

Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.report import Report
from benchmarks.views.kernels import DEMO, MISSING
from benchmarks.views.ladder import figure

HEAD = ("shape", "", "", "µs", "GB/s", "of ceiling", "target")


def print_attention(report: Report, console: Console) -> None:
    """A row for each variant and peer of each shape, then what is missing or wrong."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="right" if index > 2 else "left", no_wrap=index != 1)
    for is_ours, cells in _rows(report):
        table.add_row(*cells, style="" if is_ours else "bright_black")
    console.print(Text.assemble(("Attention", "bold"), f" · {report.machine_title}"))
    for line in _heading(report):
        console.print(Text(line, style="bright_black"))
    console.print()
    console.print(table)
    for line in errors(report):
        console.print(Text(f"wrong: {line}", style="red"))
    for line in _missing(report):
        console.print(Text(line, style="yellow"))


def markdown(report: Report) -> str:
    """The same as Markdown."""
    lines = [f"# Decode attention over paged memory on {report.machine_title}", ""]
    lines += [f"{line}  " for line in _heading(report)]
    lines += ["", f"| {' | '.join(HEAD)} |", "|---|---|---|" + "---:|" * (len(HEAD) - 3)]
    lines += [f"| {' | '.join(cells)} |" for _, cells in _rows(report)]
    notes = [f"- wrong: {line}" for line in errors(report)] + [f"- {line}" for line in _missing(report)]
    return "\n".join([*lines, "", *notes] if notes else lines) + "\n"


def errors(report: Report) -> list[str]:
    """A line for each of our variants whose result was wrong."""
    return [
        f"{name} {variant}: {row['error']}"
        for name, shape in report.results["shapes"].items()
        for variant, row in shape["variants"].items()
        if row["error"]
    ]


def _heading(report: Report) -> list[str]:
    flags, ceilings = report.flags, report.results["ceilings"]
    lines = [DEMO] if flags["is_demo_size"] else []
    lines.append(f"read ceiling of this run: {figure(ceilings['read_gb_per_second'])} GB/s")
    plans = ", ".join(f"{us} µs for {count}" for count, us in report.results["planning_us"].items())
    lines.append(f"{flags['dtype']}, blocks of {flags['block_size']}, median of {flags['trials']}; a plan: {plans}")
    return lines


def _rows(report: Report) -> Iterator[tuple[bool, list[str]]]:
    """Whether it is ours, and the cells of ``HEAD``."""
    for name, shape in report.results["shapes"].items():
        for index, (variant, row) in enumerate(shape["variants"].items()):
            labels = [name, shape["shape"]] if index == 0 else ["", ""]
            target = _target(shape) if index == 0 else ""
            yield True, [*labels, variant.replace("_", " "), *_figures(row), target]
        for peer, row in shape["peers"].items():
            if row["time_us"] is not None:
                yield False, ["", "", peer.replace("_", " "), *_figures(row), ""]


def _figures(row: dict[str, Any]) -> list[str]:
    if row["time_us"] is None:
        return [MISSING] * 3
    return [figure(row["time_us"]), figure(row["gb_per_second"]), f"{100 * row['share_of_ceiling']:.0f} %"]


def _target(shape: dict[str, Any]) -> str:
    if shape["is_reached"] is None:
        return ""
    if shape["target_gb_per_second"] is not None:
        wanted = f"≥ {figure(shape['target_gb_per_second'])} GB/s"
    elif shape["target_us"] is not None:
        wanted = f"≤ {figure(shape['target_us'])} µs"
    else:
        reached = MISSING if shape["times_unsplit"] is None else f"{shape['times_unsplit']}×"
        wanted = f"≥ {shape['target_times_unsplit']}× unsplit, {reached}"
    return f"{wanted}: {'reached' if shape['is_reached'] else 'missed'}"


def _missing(report: Report) -> list[str]:
    """Why a peer has no time."""
    reasons: dict[str, list[str]] = {}
    for name, shape in report.results["shapes"].items():
        for peer, row in shape["peers"].items():
            why = row.get("missing") or row.get("error")
            if why:
                reasons.setdefault(f"no {peer.replace('_', ' ')}: {why}", []).append(name)
    return [f"{reason} ({', '.join(places)})" for reason, places in reasons.items()]
