"""``infer simulate``: its table, its JSON and what it refuses."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.simulation.arrivals import Conversations
from shared.simulation.fleet import FleetPlan
from shared.simulation.replica import EngineLimits

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


OPTIONS = """--gateways 2 --table-keys 9 --report-seconds 0.5 --update-at 3 --update-together 4 --max-batch-size 5
--kv-tokens 4096 --block-tokens 32 --price 7 --seed 8 --systems 6 --system-tokens 10 --turn-tokens 11 --new-tokens 12
--turns 1.5 --pause 2.5 --json --replicas 8,9 --router prefix,round-robin"""


def test_options_reach_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of replicas and router in turn; a recorded trace has no warm-up, and its own rate by default."""
    found: list[Any] = []
    monkeypatch.setattr("shared.simulation.fleet.Fleet", lambda plan, times, limits, seed: (plan, limits, seed))
    monkeypatch.setattr("shared.simulation.results.serve", lambda *given: found.append(given))
    for name in ("arrival_times", "conversations", "recorded"):
        monkeypatch.setattr(f"shared.simulation.arrivals.{name}", lambda *given: given)
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    run(*OPTIONS.split(), "--trace", "steady", "--rate", "5", "--seconds", "40")
    run(*OPTIONS.split(), "--seconds", "8")
    run(*OPTIONS.split(), "--trace", str(trace), "--rate", "5")
    run(*OPTIONS.split(), "--trace", str(trace))
    people = Conversations(6, 10, 11, 12, 1.5, 2.5, block_tokens=32)
    expected = []
    for shape, rate, seconds in (("steady", 5.0, 40.0), ("poisson", 10.0, 8.0), (None, 5.0, 0.0), (None, None, 0.0)):
        for number, router in product((8, 9), ("prefix", "round-robin")):
            fleet = FleetPlan(number, router, 2, 9, 0.5, 3.0, 4), EngineLimits(5, block_size=32, kv_tokens=4096), 8
            scaled = None if rate is None else rate * number
            made = ((shape, scaled, seconds, 8), people, 8) if shape else (trace, 32, scaled)
            expected.append((fleet, made, seconds / 4, 7.0))
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *((["--replicas", each], f"--replicas is '{each}'") for each in ("ten", "0", "1,0", "100001", "-1")),
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
