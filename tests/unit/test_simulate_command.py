"""``infer simulate``: its table, its JSON and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.cli import app

SMALL = ("--replicas", "2,4", "--router", "prefix,round-robin", "--seconds", "4", "--rate", "5")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_has_a_row_for_each_number_of_replicas_and_router() -> None:
    said = run(*SMALL)
    assert "step times of Llama 3.2 1B on an H100" in said
    assert [line.split()[:2] for line in said.splitlines() if line.split()[:1] in (["2"], ["4"])] == [
        [num, router] for num in "24" for router in ("prefix", "round-robin")
    ]


def test_json_is_the_same_for_a_seed_and_the_requests_for_each_router() -> None:
    found = json.loads(run(*SMALL, "--json"))
    assert found == json.loads(run(*SMALL, "--json"))
    assert found["step_times"]["step"] > 0
    first, second = found["results"][:2]
    assert first["requests"] == second["requests"] > 10
    assert first["hit_rate"] > second["hit_rate"]


def test_a_recorded_trace_is_served_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * n, "input_length": 64, "output_length": 8, "hash_ids": [0, n]} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, lines)))
    (found,) = json.loads(
        run("--replicas", "1", "--router", "prefix", "--trace", str(path), "--block-tokens", "32", "--json")
    )["results"]
    assert found["requests"] == 30
    assert found["hit_rate"] == pytest.approx(29 * 32 / (30 * 64))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas", "ten"], "--replicas is 'ten'"),
        (["--router", "random"], "router is 'random'"),
        (["--trace", "tides"], "--trace is 'tides'"),
        (["--step-times", "no.json"], "no.json cannot be read"),
        (["--price", "-1"], "--price is -1"),
        (["--kv-tokens", "100"], "A request has"),
    ],
)
def test_what_is_refused_is_named(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *SMALL, *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
