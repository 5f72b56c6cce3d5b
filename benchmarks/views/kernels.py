"""The kernel benchmark and the machine's ceilings as a reader sees them: tables in the terminal, and Markdown.

Introduced in phase 3.1. Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.hardware import Ceilings, table_rows
from benchmarks.report import Report
from benchmarks.views.ladder import figure

HEAD = ("kernel", "size", "shape", "µs", "predicted", "GB/s", "of ceiling", "eager µs", "compiled µs")
DEMO = "demo size: tiny shapes on a CPU, where our launchers call the ops; the figures show the way, not a GPU's speed"
MISSING = "–"


def print_hardware(report: Report, ceilings: Ceilings, console: Console) -> None:
    """What the machine reached."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in table_rows(ceilings):
        table.add_row(name, value)
    console.print(Text.assemble(("Ceilings", "bold"), f" · {report.machine_title}"), "", table, sep="\n")


def hardware_markdown(report: Report, ceilings: Ceilings) -> str:
    """The same as Markdown."""
    rows = [f"| {name} | {value} |" for name, value in table_rows(ceilings)]
    return "\n".join([f"# Ceilings of {report.machine_title}", "", "| | reached |", "|---|---:|", *rows]) + "\n"


def rows_of(report: Report) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kernel, size and row, in the order of the report."""
    for kernel, sizes in report.results["kernels"].items():
        for size, row in sizes.items():
            yield kernel, size, row


def errors(report: Report) -> list[str]:
    """A line for each kernel whose result was wrong."""
    return [f"{kernel} {size}: {row['error']}" for kernel, size, row in rows_of(report) if row["error"]]


def print_kernels(report: Report, console: Console) -> None:
    """One row a kernel and size, then what went wrong."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in HEAD[:3]:
        table.add_column(name, no_wrap=name != "shape")
    for name in HEAD[3:]:
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for kernel, size, row in rows_of(report):
        name, *cells = _cells(kernel, size, row)
        style = "red" if row["error"] else ""
        table.add_row(Text(name if kernel != before else "", style="bold"), *cells, style=style)
        before = kernel
    console.print(Text.assemble(("Kernels", "bold"), f" · {report.model['name']} · {report.machine_title}"))
    for line in _heading(report):
        console.print(Text(line, style="bright_black"))
    console.print()
    console.print(table)
    for line in errors(report):
        console.print(Text(f"wrong: {line}", style="red"))
    for line in _missing(report):
        console.print(Text(line, style="yellow"))


def markdown(report: Report) -> str:
    """The figures as a Markdown table."""
    lines = [f"# Kernels: {report.model['name']} on {report.machine_title}", ""]
    lines += [f"{line}  " for line in _heading(report)]
    lines += ["", f"| {' | '.join(HEAD)} |", "|---|---:|---|" + "---:|" * (len(HEAD) - 3)]
    lines += [f"| {' | '.join(_cells(kernel, size, row))} |" for kernel, size, row in rows_of(report)]
    notes = [f"- wrong: {line}" for line in errors(report)] + [f"- {line}" for line in _missing(report)]
    return "\n".join([*lines, "", *notes] if notes else lines) + "\n"


def _heading(report: Report) -> list[str]:
    flags, ceilings = report.flags, report.results["ceilings"]
    lines = [DEMO] if flags["is_demo_size"] else []
    reached = [
        f"read {figure(ceilings['read_gb_per_second'])} GB/s",
        f"copy {figure(ceilings['copy_gb_per_second'])} GB/s",
    ]
    if ceilings["launch_graph_us"] is not None:
        reached.append(f"a launch in a graph {ceilings['launch_graph_us']} µs")
    lines.append(f"ceilings of this run: {', '.join(reached)}")
    lines.append(
        f"{flags['dtype']}, median of {flags['trials']}; size is rows, of attention tokens of context; predicted: what "
        "the bytes that must move take at the ceiling, and the launches"
    )
    return lines


def _missing(report: Report) -> list[str]:
    """Why a peer has no time; at demo size nobody asked for one."""
    reasons: dict[str, list[str]] = {}
    for kernel, size, row in rows_of(report):
        for peer in ("eager", "compiled") if report.flags["compile"] else ("eager",):
            if row[f"{peer}_missing"]:
                reasons.setdefault(f"{peer}: {row[f'{peer}_missing']}", []).append(f"{kernel} {size}")
    return [f"no {reason} ({', '.join(places)})" for reason, places in reasons.items()]


def _cells(kernel: str, size: str, row: dict[str, Any]) -> list[str]:
    """The cells of ``HEAD``."""

    def micro(key: str) -> str:
        return MISSING if row[key] is None else figure(row[key])

    share = row["share_of_ceiling"]
    return [
        kernel,
        size,
        row["shape"],
        micro("time_us"),
        micro("predicted_us"),
        micro("gb_per_second"),
        MISSING if share is None else f"{100 * share:.0f} % {row['ceiling']}",
        micro("eager_us"),
        micro("compiled_us"),
    ]
