"""Tables of a report, in the terminal and as Markdown. Introduced in phase 3.1."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

NOTHING = "–"
Row = list[str]
Shown = tuple[str, Row, list[Row]]
"""A heading, columns, rows."""


def print_tables(title: str, about: str, tables: list[Shown], notes: list[str], console: Console) -> None:
    """A report's tables for a terminal; ``title`` is the benchmark's name, a colon, and what was measured."""
    name, _, rest = title.partition(": ")
    console.print(Text.assemble((name, "bold"), f" · {rest}"))
    console.print(about, style="bright_black")
    for heading, columns, rows in tables:
        console.print(f"\n{heading}", style="bold cyan")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bright_black")
        table.add_column(columns[0], no_wrap=True)
        for column in columns[1:]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes:
        console.print(f"\n{note}")


def markdown_tables(title: str, about: str, tables: list[Shown], notes: list[str]) -> str:
    """The same as Markdown."""
    lines = [f"# {title}", "", about]
    for heading, columns, rows in tables:
        lines += ["", f"## {heading}", "", f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    for note in notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def count(value: int | None) -> str:
    """A whole number, grouped by thousands."""
    return NOTHING if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """``37 %``, with a decimal where there is only one digit."""
    return NOTHING if share is None else f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
