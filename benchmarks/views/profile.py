"""A profile as a reader sees it: where one token's time went, and the table of kernels. Introduced in phase 3.1.

Invariant: everything shown is read from the report; rows that are left out of a table are counted below it.
"""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.report import Report
from benchmarks.views.table import percent

MARKDOWN_ROWS = 40


def print_profile(report: Report, console: Console, top: int) -> None:
    """The facts of a token, then the ``top`` longest rows."""
    result = _result(report)
    console.print(
        Text.assemble(
            ("Profile", "bold"), f" · phase {report.flags['phase']}: {result['title']} · {report.model['name']} · "
        )
        + report.machine_title
    )
    console.print(head(report), style="bright_black")
    console.print()
    for name, value in facts(report):
        console.print(Text.assemble((f"{name:26}", "bright_black"), value), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bright_black")
    for index, column in enumerate(columns(report)):
        table.add_column(column, justify="right" if index else "left", no_wrap=bool(index))
    shown = result["rows"][: max(0, top)]
    for row in shown:
        table.add_row(*cells(row))
    console.print(table)
    console.print(rest(result["rows"], len(shown)), style="bright_black")


def markdown(report: Report) -> str:
    """The same as Markdown."""
    result = _result(report)
    lines = [
        f"# Profile: phase {report.flags['phase']}, {report.model['name']} on {report.machine_title}",
        "",
        f"{head(report)}; {report.date[:10]}.",
        "",
        *(f"- {name}: {value}" for name, value in facts(report)),
        "",
        f"| {' | '.join(columns(report))} |",
        "|---|" + "---:|" * (len(columns(report)) - 1),
    ]
    shown = result["rows"][:MARKDOWN_ROWS]
    lines += [f"| {' | '.join(cells(row))} |" for row in shown]
    return "\n".join([*lines, "", rest(result["rows"], len(shown))]) + "\n"


def head(report: Report) -> str:
    """What was run."""
    flags = report.flags
    text = f"{flags['steps']} decode steps behind {flags['prompt_tokens']} tokens, batch 1, {flags['dtype']}"
    return f"{text}, demo size (no GPU)" if flags["is_demo_size"] else text


def facts(report: Report) -> list[tuple[str, str]]:
    """What a token took, and how much of that ran where."""
    result = _result(report)
    found = [
        (
            "a token takes",
            f"{_us(result['us_per_token'])} without the profiler, {_us(result['profiled_us_per_token'])} with it",
        )
    ]
    if result["kernel_us_per_token"] is not None:
        found += [
            ("kernels run for", f"{_us(result['kernel_us_per_token'])}, {result['kernels_per_token']:g} kernels"),
            ("no kernel runs for", f"{_us(result['idle_us_per_token'])}: the GPU waits for the host"),
            (
                "the host calls",
                f"{result['host_launches_per_token']:g} launches, {result['own_launches_per_token']:g} of them of "
                f"kernels in shared/kernels; {result['copies_per_token']:g} copies and fills",
            ),
        ]
    return [*found, ("the host works for", f"{_us(result['host_us_per_token'])} in PyTorch's operations, profiled")]


def columns(report: Report) -> list[str]:
    """Headings; the share is of what the first fact says on a GPU, of the sum of the rows on a CPU."""
    is_gpu = _result(report)["kernel_us_per_token"] is not None
    return ["kernel" if is_gpu else "operation", "a token", "µs a token", "µs each", "share"]


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    share = percent(row["share"])
    return [row["name"], f"{row['count_per_token']:g}", f"{row['us_per_token']:,.1f}", f"{row['us_each']:,.1f}", share]


def rest(rows: list[dict[str, Any]], shown: int) -> str:
    """How much the rows behind the shown ones come to."""
    left = rows[shown:]
    if not left:
        return f"{len(rows)} rows, all shown."
    return f"{len(left)} more rows, {sum(row['us_per_token'] for row in left):,.1f} µs a token together."


def _result(report: Report) -> dict[str, Any]:
    return report.results[report.flags["phase"]]


def _us(value: float) -> str:
    return f"{value:,.0f} µs" if value >= 100 else f"{value:.1f} µs"
