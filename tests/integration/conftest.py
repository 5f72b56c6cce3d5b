"""Fixtures of the tests that start programs."""

from collections.abc import Iterator

import pytest

from tutorial.workshop.check import CheckServer


@pytest.fixture(scope="session")
def check_server() -> Iterator[CheckServer]:
    """One server for all checks of a worker, which imports PyTorch once and forks for each."""
    with CheckServer() as server:
        yield server
