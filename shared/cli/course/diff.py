"""``infer diff``: the changes from one phase to another. Introduced in phase 1b.

The lesson is the diff of the two phase folders, the diff of the parts that the newer phase replaces, and the shared
modules that it adds. Lines of exercises are folded, as on every page, unless they are asked for.
"""

from typing import Annotated

import typer

from shared.lesson_source import added_modules, diff_lines, first_line, phase_pair
from shared.terminal import examples, stdout_console

EPILOG = examples("infer diff 01b 02", "infer diff 01b 02 --all", "infer diff 7 8 --solutions | less")
_STYLES = (("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))


def diff(
    older: Annotated[str, typer.Argument(help="A phase, such as 01b.")],
    newer: Annotated[str, typer.Argument(help="A later phase, such as 02.")],
    all_files: Annotated[bool, typer.Option("--all", help="Show the tests as well.")] = False,
    solutions: Annotated[bool, typer.Option("--solutions", help="Show the lines of exercises as well.")] = False,
) -> None:
    """Show the difference of two phases: engine.py first, then the parts that the newer one replaces, and those that it
    adds.
    """
    from tutorial.checker.folds import folded_diff

    before, after = phase_pair(older, newer)
    console = stdout_console()
    lines = diff_lines(before, after, with_tests=all_files)
    for line in lines if solutions else folded_diff(lines):
        style = next((style for prefix, style in _STYLES if line.startswith(prefix)), "")
        console.print(line, style=style, markup=False, soft_wrap=True)
    added = added_modules(before, after)
    console.print(f"\nshared modules that phase {after.number} adds: {len(added) or 'none'}", style="bold")
    width = max(map(len, added), default=0)
    for module in added:
        console.print(f"  {module:{width}}  {first_line(module)}", markup=False, soft_wrap=True)
