"""Makes the pages of this folder tests; see ``tutorial/checker``."""

from pathlib import Path

import pytest

from tutorial.checker import collector
from tutorial.checker.collector import ChapterItem, pytest_terminal_summary

__all__ = ["pytest_collect_file", "pytest_terminal_summary"]

IN_MAKE_TEST = ("phase_01a", "phase_06")
"""Pages whose code and commands `make test` runs too. Of the others it checks only what they quote and refer to."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """The pages lie in this folder itself; what is below it is no chapter."""
    return collector.pytest_collect_file(file_path, parent) if file_path.parent == Path(__file__).parent else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, ChapterItem) and item.kind in ("run", "console") and item.path.stem not in IN_MAKE_TEST:
        item.add_marker("slow")
