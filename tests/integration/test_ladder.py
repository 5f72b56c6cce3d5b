"""The ladder on a tiny model: a real measurement of every phase that generates."""

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.ladder import measure_ladder
from benchmarks.machine import machine_name
from benchmarks.report import Report, read_value
from benchmarks.views.ladder import markdown, print_ladder
from benchmarks.views.ladder_figure import save_figure
from shared.cli import app
from shared.errors import CapacityError, ConfigError, RequestError
from shared.lessons import lessons

PROMPT, NEW, CONTEXTS = 5, 4, [3, 9, 40]
PHASES = [lesson.number for lesson in lessons() if lesson.generates]


@pytest.fixture(scope="module")
def model(tiny_checkpoints: dict[str, Path]) -> str:
    return str(tiny_checkpoints["llama"])


@pytest.fixture(scope="module")
def report(model: str) -> Report:
    return measure_ladder(model, prompt_tokens=PROMPT, new_tokens=NEW, trials=2, context_lengths=CONTEXTS)


def test_every_phase_that_generates_is_a_rung(report):
    assert list(report.results) == list(report.engines) == PHASES
    for result in report.results.values():
        assert result["decode_tokens_per_second"] > 0
        assert result["time_to_first_token_ms"] > 0
        assert len(result["decode_tokens_per_second_trials"]) == 2
        assert list(result["ms_per_token"]) == ["3", "9", "40"]
        assert all(cost > 0 for cost in result["ms_per_token"].values())
        assert all(count >= 2 for count in result["tokens_timed"].values())
    assert report.results[PHASES[0]]["speedup"] == 1.0


def test_the_tokens_computed_explain_the_speed(report):
    """Without a cache the i-th new token pays for prompt and answer so far; with one, every token is computed once."""
    assert report.results["02"]["tokens_computed"] == sum(PROMPT + i for i in range(NEW))
    if "03" in report.results:
        assert report.results["03"]["tokens_computed"] == PROMPT + NEW - 1


def test_phases_answer_the_same_in_fp32(report):
    assert all(result["equal_output"] for result in report.results.values())


def test_the_report_knows_its_run_and_no_path(report, model):
    content = report.to_dict()
    assert content["flags"]["contexts"] == CONTEXTS
    assert content["flags"]["dtype"] == "float32"
    assert content["model"]["config"]["model_type"] == "llama"
    assert content["engines"]["02"]["model"] == Path(model).name
    assert str(Path(model).parent) not in json.dumps(content)


def test_the_figure_is_a_picture(report, tmp_path):
    save_figure(report, tmp_path / "ladder.png")
    pixels = imread(tmp_path / "ladder.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1000
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01
    assert (pixels[..., 3] == 1).all()  # its own background


@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_shows_each_phase_on_lines_that_fit(report, width):
    console = Console(width=width, record=True, force_terminal=True)
    print_ladder(report, console)
    text = console.export_text()
    assert "█" in text
    assert all(len(line) <= width for line in text.splitlines())
    for number in report.results:
        assert any(line.startswith(number) and "tok/s" in line for line in text.splitlines())
    assert all(f"| {number} {report.results[number]['title']} |" in markdown(report) for number in report.results)


def test_the_command_prints_json_last_and_writes_the_files(model, tmp_path):
    arguments = ["ladder", "--model", model, "--phase", "2", "--prompt-tokens", "4", "--new-tokens", "3"]
    arguments += ["--trials", "1", "--contexts", "2,6", "--threads", "1", "--out", str(tmp_path / "reports")]
    before = torch.get_num_threads()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == before

    line = json.loads(result.stdout.splitlines()[-1])
    assert list(line["results"]) == ["02"]
    assert line["flags"]["threads"] == 1
    stem = f"ladder-tiny-llama-{line['machine']}"
    assert line["machine"].startswith(machine_name("cpu").split("x-")[0].rstrip("0123456789") + "1x-")
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {
        f"{stem}{end}" for end in (".json", ".md", ".png")
    }
    path = tmp_path / "reports" / f"{stem}.json"
    assert read_value(path, "results.02.tokens_computed") == 4 + 5 + 6
    assert read_value(path, "results") == line["results"]
    assert read_value(path, "machine.torch_threads") == 1
    assert path.with_suffix(".png").stat().st_size > 1000


def test_quick_measures_no_curve_and_writes_nothing(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["ladder", "--model", model, "--quick"])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert list(line["results"]) == PHASES
    assert line["results"]["02"]["ms_per_token"] == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"prompt_tokens": 0}, ConfigError, "prompt_tokens is 0"),
        ({"prompt_tokens": -3}, ConfigError, "prompt_tokens is -3"),
        ({"new_tokens": 1}, ConfigError, "new_tokens is 1"),
        ({"trials": 0}, ConfigError, "trials is 0"),
        ({"threads": 0}, ConfigError, "threads is 0"),
        ({"prompt_tokens": 2048}, RequestError, "2048 tokens"),
        ({"prompt_tokens": 2040, "new_tokens": 9}, RequestError, "2048 tokens"),
        ({"context_lengths": [16, 2048]}, RequestError, "context length is 2048"),
        ({"context_lengths": [0]}, ConfigError, "context length is 0"),
        ({"phases": ["99"]}, ConfigError, "99"),
        ({"phases": ["01a"]}, ConfigError, "generates no text"),
        ({"phases": []}, ConfigError, "No phase"),
        ({"dtype": "int3"}, ConfigError, "int3"),
        ({"device": "cuda:77"}, ConfigError, "cuda:77"),
        ({"device": "abacus"}, ConfigError, "abacus"),
        ({"seed": -1}, ConfigError, "seed is -1"),
    ],
)
def test_bad_settings_are_refused_before_any_work(model, settings, error, told):
    def progress(*_):
        raise AssertionError("work began")

    with pytest.raises(error) as caught:
        measure_ladder(model, **settings, progress=progress)
    assert told in str(caught.value)


def test_a_model_too_large_for_the_memory_is_refused(model, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000, "total": 1000}))
    with pytest.raises(CapacityError, match="--phase"):
        measure_ladder(model)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--contexts", "64,many"],
        ["--phase", "99"],
        ["--prompt-tokens", "0"],
        ["--prompt-tokens", "2048"],
        ["--trials", "0"],
    ],
)
def test_the_command_refuses_in_one_paragraph(model, arguments):
    result = CliRunner().invoke(app, ["ladder", "--model", model, *arguments])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert arguments[1] in result.output


def test_phases_are_ordered_and_named_once(model):
    asked = [PHASES[-1], "2", "02"]
    report = measure_ladder(model, prompt_tokens=2, new_tokens=2, trials=1, phases=asked, context_lengths=())
    assert list(report.results) == sorted({"02", PHASES[-1]})


def test_default_contexts_are_those_the_model_can_hold(tiny_checkpoints, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(tiny_checkpoints["qwen3"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    report = measure_ladder(str(folder), prompt_tokens=2, new_tokens=2, trials=1, phases=["02"])
    assert report.flags["contexts"] == [16, 32]
