"""A report's presentation: tables, notes and panels, described once, printed or written as Markdown, and drawn by
:mod:`benchmarks.figure`. Introduced in phase 3. Invariant: a view is made only from a report's values.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.bar import Bar as RichBar
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "–"
BAR_WIDTH, HEADING_WIDTH = 16, 12  # in a terminal
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

Row = Mapping[str, Any]


def number(value: float | None) -> str:
    """A measurement for readers: three digits if it has a decimal point, and no decimals from 100 on."""
    if value is None:
        return NOTHING
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def count(value: int | None) -> str:
    """A whole number, with thousands separators."""
    return NOTHING if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """``37 %``, with one decimal if there is only one digit."""
    return NOTHING if share is None else f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def times(ratio: float | None) -> str:
    """A ratio: ``4.25×``, ``130×``."""
    return NOTHING if ratio is None else f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.2f}×"


def percentiles(values: Mapping[str, float] | None) -> str:
    """``12.1 / 30.2 / 51.0``, in the given order."""
    return " / ".join(map(number, values.values())) if values else NOTHING


def quantity(value: float, unit: str) -> str:
    """Four digits and the unit with its prefix: ``2.472 GB``, ``786 TFLOP/s``."""
    for size, prefix in PREFIXES:
        if value >= size:
            value, unit = value / size, prefix + unit
            break
    return f"{value:,.0f} {unit}" if value == int(value) < 1000 else f"{_four_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """Seconds in a suitable unit: ``818.5 µs``, ``2.310 ms``."""
    size, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    return f"{_four_digits(seconds * size)} {unit}"


def _four_digits(value: float) -> str:
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1}f}"


@dataclass(frozen=True)
class Column:
    """A column: ``value`` is a key of the row, or a function of the row; ``form`` formats the value; ``is_bar`` draws
    it as a bar, which Markdown omits.
    """

    heading: str
    value: str | Callable[[Row], Any]
    form: Callable[[Any], str] = number
    is_text: bool = False
    is_bar: bool = False

    def get(self, row: Row) -> Any:
        """The value of a row; None if the row lacks the key."""
        return self.value(row) if callable(self.value) else row.get(self.value)

    def cell(self, row: Row) -> str:
        return self.form(self.get(row))


def text(heading: str, value: str | Callable[[Row], Any]) -> Column:
    """A column of words, aligned to the left."""
    return Column(heading, value, form=lambda said: NOTHING if said is None else str(said), is_text=True)


@dataclass(frozen=True)
class Table:
    """Rows under a heading; ``style`` names rich's style of a row, such as ``red`` for a wrong result."""

    heading: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    style: Callable[[Row], str] = lambda row: ""


def table_of(heading: str, what: str, rows: Mapping[str, Row], **forms: Callable[[Any], str]) -> Table:
    """Rows by name, under ``what``, with a column for each key of a row that has no list; ``forms`` formats those that
    are not plain numbers.
    """
    keys = dict.fromkeys(key for row in rows.values() for key, value in row.items() if not isinstance(value, list))
    columns = [text(what, ""), *(Column(key.replace("_", " "), key, forms.get(key, number)) for key in keys)]
    return Table(heading, columns, [{"": name, **row} for name, row in rows.items()])


@dataclass(frozen=True)
class Bar:
    """A horizontal bar: ``text`` is written at its end; ``colour`` is a name in `benchmarks.figure.COLOURS`."""

    label: str
    length: float
    text: str
    colour: str = "ours"


@dataclass(frozen=True)
class Bars:
    """A panel of groups of bars, from top to bottom; ``limit``: a vertical line at a value, and its label."""

    title: str
    groups: Sequence[tuple[str, Sequence[Bar]]]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True)
class Lines:
    """A panel of lines over the same ``x``, each a name and a value for each x, or None; both axes are logarithmic.

    ``curves``: the expected line for each line, dashed and without points; none, or one for each.
    """

    title: str
    x: Sequence[float]
    lines: Sequence[tuple[str, Sequence[float | None]]]
    curves: Sequence[Sequence[float | None]] = ()


@dataclass(frozen=True)
class View:
    """A report for reading. ``title`` is the benchmark's name, a colon, and what was measured."""

    title: str
    subtitles: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    panels: Sequence[Bars | Lines] = field(default=())


def show(view: View, console: Console) -> None:
    """Print a view on a terminal."""
    name, _, rest = view.title.partition(": ")
    console.print(Text.assemble((name, "bold"), f" · {rest}" if rest else ""))
    for line in view.subtitles:
        console.print(Text(line, style="bright_black"))
    for table in view.tables:
        console.print()
        if table.heading:
            console.print(Text(table.heading, style="bold cyan"))
        console.print(_rich_table(table))
    for lines, style in ((view.notes, ""), (view.warnings, "yellow")):
        for index, line in enumerate(lines):
            console.print(Text(line if index else f"\n{line}", style=style))


def markdown(view: View) -> str:
    """The same as Markdown."""
    lines = [f"# {view.title}", "", *(f"{line}  " for line in view.subtitles)]
    for table in view.tables:
        columns = [column for column in table.columns if not column.is_bar]
        lines += ["", f"## {table.heading}"] if table.heading else []
        lines += ["", f"| {' | '.join(column.heading for column in columns)} |"]
        lines.append("|" + "".join("---|" if column.is_text else "---:|" for column in columns))
        for row in table.rows:
            lines.append(f"| {' | '.join(column.cell(row).replace('|', '/') for column in columns)} |")
    for note in (*view.notes, *view.warnings):
        lines += ["", note]
    return "\n".join(line.rstrip() if line.strip() in ("", "|") else line for line in lines) + "\n"


def _rich_table(table: Table) -> RichTable:
    found = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bright_black")
    for column in table.columns:
        justify: Any = "left" if column.is_text or column.is_bar else "right"
        found.add_column("\n".join(textwrap.wrap(column.heading, HEADING_WIDTH)), justify=justify)
    for row in table.rows:
        found.add_row(*(_cell(column, row, table) for column in table.columns), style=table.style(row))
    return found


def _cell(column: Column, row: Row, table: Table) -> Text | RichBar:
    if not column.is_bar:
        return Text(column.cell(row))
    longest = max(column.get(other) or 0 for other in table.rows) or 1
    return RichBar(longest, 0, column.get(row) or 0, width=BAR_WIDTH, color=table.style(row).split(" ")[-1] or "cyan")
