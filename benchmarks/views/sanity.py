"""The sanity check as a reader sees it: a row for each model in each phase. Introduced in phase 3.1."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.report import Report

COLUMNS = ("model", "phase", "load (s)", "answer (s)", "memory (MB)", "tokens", "flips", "")
NOTHING = "–"


def print_sanity(report: Report, console: Console) -> None:
    """The table, then how many failed."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bright_black")
    for index, column in enumerate(COLUMNS):
        numeric = 2 <= index < len(COLUMNS) - 1
        table.add_column(column, justify="right" if numeric else "left", no_wrap=index < len(COLUMNS) - 1)
    for row in report.results["rows"]:
        *cells, verdict = _cells(row)
        style = "red" if row["problem"] else "green"
        table.add_row(*map(escape, cells), f"[{style}]{escape(verdict)}[/{style}]")
    console.print(table)
    console.print(summary(report), style="red" if report.results["num_failed"] else "green")


def markdown(report: Report) -> str:
    """The same as Markdown."""
    lines = [f"# Sanity check on {report.machine_title}", "", f"{summary(report)} {report.date[:10]}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 3) + "---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(row))} |" for row in report.results["rows"]]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> str:
    """How many of how many."""
    failed, checked = report.results["num_failed"], report.results["num_checked"]
    if failed:
        return f"{failed} of {checked} failed."
    return f"All {checked} loaded, answered and agreed with transformers."


def _cells(row: dict[str, Any]) -> list[str]:
    memory = None if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:,.1f}"
    figures = (row["load_seconds"], row["answer_seconds"], memory, row["num_tokens"], row["flips"])
    return [row["model"], row["phase"], *map(_text, figures), row["problem"] or "ok"]


def _text(value: Any) -> str:
    return NOTHING if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
