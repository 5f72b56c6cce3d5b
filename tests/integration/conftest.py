"""Fixtures of the tests that start programs."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tutorial.workshop import check, grading, preparation
from tutorial.workshop.check import CheckServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE 127.0.0.1'"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that is not let onto the network; where there is none, the tests of pages say so."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("there is no Chromium here; on Debian: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by the package playwright")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=executable, args=shlex.split(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def model(tiny_checkpoints: dict[str, Path]) -> str:
    return str(tiny_checkpoints["llama"])


@pytest.fixture(scope="session")
def check_server(session_folder: Path, tiny_checkpoints: dict[str, Path]) -> Iterator[CheckServer]:
    """One server for all checks of a worker, which imports PyTorch once and forks for each; they find the checkpoints
    and the reference tokens of this run."""
    with CheckServer({"INFER_SESSION_FOLDER": str(session_folder)}) as server:
        yield server


@pytest.fixture
def one_server(check_server: CheckServer, monkeypatch: pytest.MonkeyPatch) -> CheckServer:
    """Commands that would start a server use that of the worker; variables that they give it reach each run."""

    class Borrowed(CheckServer):
        def __init__(self, environment: dict[str, str] | None = None, **_: object) -> None:
            super().__init__({**check_server.environment, **(environment or {})})
            self._servers = check_server._servers

        def close(self) -> None:
            pass

    for module in (check, grading, preparation):
        monkeypatch.setattr(module, "CheckServer", Borrowed)
    return check_server
