"""A server around an engine that echoes, and a client of it, for each file of this folder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.server.echo import EchoEngine, Running, serving

pytest.register_assert_rewrite("tests.unit.server.exchange")


@pytest.fixture(scope="module")
def echo(folder: Path) -> Iterator[Running]:
    with serving(EchoEngine(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def client(echo: Running) -> Iterator[httpx.Client]:
    with echo.client() as client:
        yield client
