"""Makes the pages of this folder tests; see ``tutorial/checker``."""

from pathlib import Path

import pytest

from tutorial.checker import collector
from tutorial.checker.collector import pytest_terminal_summary

__all__ = ["pytest_collect_file", "pytest_terminal_summary"]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """The pages lie in this folder itself; what is below it is no chapter."""
    return collector.pytest_collect_file(file_path, parent) if file_path.parent == Path(__file__).parent else None
