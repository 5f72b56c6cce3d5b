"""What tests of `infer trace` share: the command, run in this process, and the data of the page that it writes."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from shared.cli import app
from tests.unit.tracing.written import embedded

WORK = ("--requests", "7", "--max-tokens", "24", "--max-batch-size", "2", "--rate", "0.5", "--seed", "4")


def traced(*arguments: str | Path) -> str:
    """What ``infer trace`` prints."""
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def page_data(path: Path) -> list[dict[str, Any]]:
    return embedded(path.read_text(encoding="utf-8"))["traces"]


def held_after(trace: dict[str, Any], step: int) -> dict[str, list[int]]:
    """The block tables after a step."""
    tables = {
        request["request_id"]: [block for block, first, after in told["blocks"] if first <= step < after]
        for request, told in zip(trace["requests"], trace["memory"]["holdings"], strict=True)
    }
    return {name: blocks for name, blocks in tables.items() if blocks}


def cached_after(trace: dict[str, Any], step: int) -> list[int]:
    return [block for block, first, after in trace["memory"]["cached"] if first <= step < after]
