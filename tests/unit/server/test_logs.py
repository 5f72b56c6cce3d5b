"""Lines of the log: one line a record, from whichever logger of the process it comes."""

import asyncio
import gc
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.server.http import logs
from tests.unit.server.echo import EchoEngine, serving
from tests.unit.server.exchange import completion


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """Takes the lines that were written to standard error; the loggers are as they were afterwards."""
    root, infer = logging.getLogger(), logging.getLogger("infer")
    handlers, levels = root.handlers, (root.level, infer.level)
    yield lambda: capsys.readouterr().err.splitlines()
    root.handlers = handlers
    for logger, level in zip((root, infer), levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("style", logs.FORMATS)
def test_a_log_line_is_one_line(style: str, written: Callable[[], list[str]]) -> None:
    logs.configure(style)
    logs.log_event(logging.INFO, "request", path="/a\nb {x} é", cause="two words", status=200, gone=None)
    logs.log_event(logging.DEBUG, "request", path="/quiet")
    logging.getLogger("uvicorn.error").info("not a warning")
    (line,) = written()
    assert "gone" not in line
    if style == "json":
        read = json.loads(line)
        assert (read["event"], read["level"], read["path"], read["status"]) == ("request", "info", "/a\nb {x} é", 200)
        assert read["time"].endswith("+00:00")
    else:
        assert line[8:] == ' info    request path="/a\\nb {x} \\u00e9" cause="two words" status=200'


@pytest.mark.parametrize("name", [None, "infer", "infer.engine", "uvicorn.error", "asyncio", "shared.engine", "others"])
def test_a_traceback_is_a_field_of_its_line_whichever_logger_has_it(
    name: str | None, written: Callable[[], list[str]]
) -> None:
    logs.configure("json")
    logs.configure("json")  # and the line is not written twice
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger(name).exception("request %s failed", "a\nb", stack_info=True)
    line = json.loads(*written())
    assert (line["event"], line["level"]) == ("request a\nb failed", "error")
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith("ValueError: two\nlines")
    assert "test_logs.py" in line["stack"]


def test_libraries_failures_are_lines_of_the_log_too(
    written: Callable[[], list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route's, which uvicorn logs; a task's that is awaited nowhere, which asyncio logs; the engine loop's own."""

    async def forget() -> None:
        async def fail() -> None:
            raise KeyError("forgotten")

        await asyncio.wait([asyncio.get_running_loop().create_task(fail())])
        gc.collect()

    engine = EchoEngine(folder)
    with serving(engine) as running, running.client() as client:
        logs.configure("json")
        monkeypatch.setattr(running.app.state.metrics, "exposition", lambda: 1 / 0)
        assert client.get("/metrics").status_code == 500
        asyncio.run(forget())
        engine.bug = RuntimeError("the device is lost")
        assert client.post("/v1/completions", json=completion()).status_code == 500
    lines: list[dict[str, Any]] = [json.loads(line) for line in written()]
    found = [line["traceback"].splitlines()[-1] for line in lines if "traceback" in line]
    assert sorted(found) == [
        "KeyError: 'forgotten'",
        "RuntimeError: the device is lost",
        "ZeroDivisionError: division by zero",
    ]
    assert [line["status"] for line in lines if line["event"] == "request"] == [500, 500]
