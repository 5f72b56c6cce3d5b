"""Fixtures of the tests that start programs."""

from collections.abc import Iterator

import pytest

from tutorial.workshop import check, grading, preparation
from tutorial.workshop.check import CheckServer


@pytest.fixture(scope="session")
def check_server() -> Iterator[CheckServer]:
    """One server for all checks of a worker, which imports PyTorch once and forks for each."""
    with CheckServer() as server:
        yield server


@pytest.fixture
def one_server(check_server: CheckServer, monkeypatch: pytest.MonkeyPatch) -> CheckServer:
    """Commands that would start a server use that of the worker; variables that they give it reach each run."""

    class Borrowed(CheckServer):
        def __init__(self, environment: dict[str, str] | None = None, *, forks: bool = True) -> None:
            super().__init__(environment)
            self._servers = check_server._servers

        def close(self) -> None:
            pass

    for module in (check, grading, preparation):
        monkeypatch.setattr(module, "CheckServer", Borrowed)
    return check_server
