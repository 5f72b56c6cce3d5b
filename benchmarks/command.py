"""A benchmark as a command: a module that runs by itself, or a command of ``infer bench``. Introduced in phase 3.1.

Invariant: the last line on standard output is one JSON line.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import Report, write_report
from benchmarks.view import View, show


def present(report: Report, view: View, out: Path | None, console: Console, written: Sequence[Path] = ()) -> None:
    """Print a report, write it to ``out``, name the written files, and print the JSON line last."""
    show(view, console)
    for index, path in enumerate([*written, *(write_report(report, out, view=view) if out is not None else [])]):
        console.print(("\n" if index == 0 else "") + f"wrote {path}", style="bright_black", soft_wrap=True)
    print(f"\n{report.line()}")


def run(measure: Callable[..., Report], view: Callable[[Report], View], description: str | None) -> None:
    """Measure what the command line requests, and present it.

    The options are ``--out`` and the arguments of ``measure``, by name and default: an option has the type of its
    default, or text if that is None; an option whose default is a tuple takes several values. Help shows
    ``description``, and the options' descriptions from ``measure``.
    """
    about_options = f"{description}\n{inspect.getdoc(measure)}"
    parser = argparse.ArgumentParser(description=about_options, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, argument in inspect.signature(measure).parameters.items():
        default, option = argument.default, f"--{name.replace('_', '-')}"
        if default is argument.empty:
            parser.add_argument(option, required=True)
        elif isinstance(default, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            one = default[0] if isinstance(default, tuple) else default
            options: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
            parser.add_argument(option, type=str if one is None else type(one), default=default, **options)
    parser.add_argument("--out", type=Path, help="write JSON, Markdown and PNG, named by machine, into this folder")
    given = vars(parser.parse_args())
    out = given.pop("out")
    report = measure(**given)
    present(report, view(report), out, Console())
