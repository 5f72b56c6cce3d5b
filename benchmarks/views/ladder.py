"""The ladder as a reader sees it: bars in the terminal, and Markdown. Introduced in phase 3.

Invariant: everything shown is read from the report; nothing is measured or recomputed here.
"""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.report import Report

EIGHTHS = " ▏▎▍▌▋▊▉"
COLOURS = ("bright_black", "cyan", "green", "yellow", "magenta", "blue")
"""One a rung, again from the second when there are more; the newest is bold besides."""
WIDEST_BAR = 40


def print_ladder(report: Report, console: Console) -> None:
    """Bars of decode speed, a line of facts for each phase, and the cost of a token by context."""
    console.print(render_ladder(report, console.width))


def render_ladder(report: Report, width: int = 100) -> RenderableType:
    """The ladder for a terminal of ``width`` columns."""
    results = report.results
    parts: list[RenderableType] = [_heading(report), "", _bars(results, width)]
    if any(result["ms_per_token"] for result in results.values()):
        parts += ["", Text("Milliseconds a token, by tokens of context before it", style="bold"), "", _curve(results)]
    different = [number for number, result in results.items() if not result["equal_output"]]
    if different:
        parts += ["", Text(f"Phase {', '.join(different)}: other tokens than the first rung's.", style="yellow")]
    return Group(*parts)


def markdown(report: Report) -> str:
    """The figures as Markdown tables, for a report's folder or a document."""
    flags, results = report.flags, report.results
    lines = [
        f"# Ladder: {report.model['name']} on {report.machine_title}",
        "",
        f"{flags['prompt_tokens']} tokens of prompt, {flags['new_tokens']} new, greedy, {flags['dtype']}, "
        f"{trials(flags)}, phases taking turns in one process; {report.date[:10]}.",
        "",
        "| phase | decode (tok/s) | against the first | first token (ms) | tokens computed |",
        "|---|---:|---:|---:|---:|",
    ]
    for number, result in results.items():
        cells = [f"{number} {result['title']}", figure(result["decode_tokens_per_second"]), times(result["speedup"])]
        cells += [figure(result["time_to_first_token_ms"]), f"{result['tokens_computed']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    contexts = list(next(iter(results.values()))["ms_per_token"])
    if contexts:
        lines += ["", "Milliseconds a token, by tokens of context before it:", ""]
        lines += [f"| phase | {' | '.join(contexts)} |", "|---|" + "---:|" * len(contexts)]
        for number, result in results.items():
            lines.append(f"| {number} | {' | '.join(figure(result['ms_per_token'][c]) for c in contexts)} |")
    return "\n".join(lines) + "\n"


def figure(value: float) -> str:
    """A measurement for reading: three digits where there is a point, none after it from 100 on."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float) -> str:
    """A speedup: ``4.2×``."""
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.1f}×"


def trials(flags: dict[str, Any]) -> str:
    """How the shown figures come from the trials."""
    return f"median of {flags['trials']}" if flags["trials"] > 1 else "one trial"


def _heading(report: Report) -> Text:
    flags = report.flags
    return Text.assemble(
        ("Decode speed", "bold"),
        f" · {report.model['name']} · {report.machine_title} · {flags['dtype']}\n",
        (f"{flags['prompt_tokens']} tokens in, {flags['new_tokens']} out, {trials(flags)}", "bright_black"),
    )


def _bars(results: dict[str, dict[str, Any]], width: int) -> Table:
    titles = max(len(result["title"]) for result in results.values())
    room = max(8, min(WIDEST_BAR, width - titles - 30))
    fastest = max(result["decode_tokens_per_second"] for result in results.values())
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(max_width=max(12, width - room - 28))
    grid.add_column(no_wrap=True)
    for index, (number, result) in enumerate(results.items()):
        speed, style = result["decode_tokens_per_second"], _style(index, len(results))
        label = Text.assemble((_bar(speed / fastest, room), style), f" {figure(speed)} tok/s")
        if index:
            label.append(f"  {times(result['speedup'])}", style="bold")
        facts = (
            f"first token {figure(result['time_to_first_token_ms'])} ms · {result['tokens_computed']:,} tokens computed"
        )
        grid.add_row(Text(number, style=style), Text(result["title"]), label)
        grid.add_row("", "", Text(facts, style="bright_black"))
    return grid


def _curve(results: dict[str, dict[str, Any]]) -> Table:
    contexts = list(next(iter(results.values()))["ms_per_token"])
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bright_black")
    table.add_column("phase", no_wrap=True)
    for context in contexts:
        table.add_column(context, justify="right", no_wrap=True)
    for index, (number, result) in enumerate(results.items()):
        cells = [figure(result["ms_per_token"][context]) for context in contexts]
        table.add_row(Text(number, style=_style(index, len(results))), *cells)
    return table


def _bar(share: float, width: int) -> str:
    """A bar of ``share`` of ``width`` columns, in eighths, never empty."""
    eighths = max(1, round(share * width * 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + (EIGHTHS[rest] if rest else "")


def _style(index: int, count: int) -> str:
    colour = COLOURS[0] if index == 0 else COLOURS[1 + (index - 1) % (len(COLOURS) - 1)]
    return f"bold {colour}" if index == count - 1 and index else colour
