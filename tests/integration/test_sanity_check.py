"""The sanity check: sound models pass in every phase, a broken one is a row, and a wrong answer is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.generation import sanity_subjects as sanity_subjects
from benchmarks.generation.sanity_subjects import find_subjects
from benchmarks.sanity_check import check_models, problem
from benchmarks.views.sanity import markdown, print_sanity
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.errors import ConfigError, ModelFolderError

PHASES = ["02", "03"]


def infer(*arguments: object) -> Any:
    command = ["bench", "sanity", "--device", "cpu", "--threads", "1"]
    return CliRunner().invoke(app, [*command, *map(str, arguments)])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_sound_models_pass_in_every_phase(tiny_checkpoints: dict[str, Path], dtype: str | None) -> None:
    folders = [str(folder) for folder in tiny_checkpoints.values()]
    report = check_models(models=folders, phases=PHASES, new_tokens=8, dtype=dtype, threads=1)
    rows = report.results["rows"]
    assert [(row["model"], row["phase"]) for row in rows] == [
        (folder.name, number) for folder in tiny_checkpoints.values() for number in PHASES
    ]
    assert report.results["num_failed"] == 0, rows
    for row in rows:
        assert row["num_tokens"] == 8
        assert row["flips"] == 0 or dtype == "bfloat16"
        assert row["memory_bytes"] > 0
        assert row["load_seconds"] > 0
        assert row["answer_seconds"] > 0
        assert row["text"]


def test_all_that_generate_are_checked_and_a_shape_is_made_and_removed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = check_models(shapes=["tiny-qwen3"], new_tokens=3, threads=1)
    assert [row["phase"] for row in report.results["rows"]][:2] == ["02", "03"]
    assert report.results["num_failed"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_broken_folder_is_a_row_beside_sound_ones(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(tiny_checkpoints["llama"], cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (tmp_path / "empty").mkdir()
    named = [cut, tmp_path / "empty", tmp_path / "missing", tiny_checkpoints["gemma3_text"]]
    monkeypatch.setenv("INFER_TEST_MODELS", ",".join(map(str, named)))
    monkeypatch.setattr(sanity_subjects, "KNOWN_MODELS", {})
    monkeypatch.setattr(sanity_subjects, "SHAPES", {})
    result = infer("--phase", "03", "--new-tokens", 3)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    assert (found["num_failed"], found["num_checked"]) == (3, 4)
    problems = {row["model"]: row["problem"] for row in found["rows"]}
    assert problems["tiny-gemma3"] is None
    assert "config.json" in problems["empty"]
    assert "missing" in problems["missing"]
    assert problems["cut"]
    assert str(tmp_path) not in json.dumps(found)
    assert "3 of 4 failed." in result.stdout


def test_a_wrong_answer_is_found(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase whose third token is another than the model's likeliest."""
    from phases.phase_03.engine import Engine

    plain = Engine.decode

    def other_token(self: Any, request: Any) -> torch.Tensor:
        logits = plain(self, request)
        return -logits if len(request.output_ids) == 2 else logits

    monkeypatch.setattr(Engine, "decode", other_token)
    report = check_models(models=[str(tiny_checkpoints["llama"])], phases=PHASES, new_tokens=5, threads=1)
    sound, wrong = report.results["rows"]
    assert sound["problem"] is None
    assert "below transformers' likeliest" in wrong["problem"]
    assert wrong["flips"] == 1
    assert wrong["shortfall"] > 1


def test_without_choice_everything_at_hand_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.setenv("INFER_TEST_MODELS", str(tmp_path / "mine"))
    tiny = [name for name in SHAPES if name.startswith("tiny-")]
    real = [name for name in SHAPES if not name.startswith("tiny-")]
    assert [subject.name for subject in find_subjects(None, None, 0, "cpu")] == ["mine", *tiny]
    assert [subject.name for subject in find_subjects(None, None, 0, "cuda")] == ["mine", *real]
    assert [subject.name for subject in find_subjects(None, ["tiny-llama"], 0, "cpu")] == ["tiny-llama"]


def test_problems_name_no_folder_of_the_machine() -> None:
    error = ModelFolderError("/home/someone/models/mine has no config.json\nmore; fetch it.")
    assert problem(error) == "mine has no config.json"
    assert problem(RuntimeError("CUDA out of memory")) == "RuntimeError: CUDA out of memory"
    assert problem(KeyError()) == "KeyError: KeyError"
    assert problem(ValueError("3 tokens/s and owner/name stay")) == "3 tokens/s and owner/name stay"


def test_the_table_shows_each_row_and_markup_stays_text(tiny_checkpoints: dict[str, Path]) -> None:
    report = check_models(models=[str(tiny_checkpoints["llama"])], phases=["03"], new_tokens=2, threads=1)
    report.results["rows"].append(report.results["rows"][0] | {"model": "[red]x", "problem": "a | b [/red]"})
    report.results["num_failed"], report.results["num_checked"] = 1, 2
    console = Console(width=120, record=True)
    print_sanity(report, console)
    text = console.export_text()
    assert "[red]x" in text
    assert "a | b [/red]" in text
    assert "1 of 2 failed." in text
    assert "| [red]x | 03 |" in markdown(report)
    assert "a / b" in markdown(report)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"new_tokens": 65}, "new_tokens is 65"),
        ({"phases": ["01b"]}, "generates no text"),
        ({"shapes": ["huge"]}, "no shape 'huge'"),
        ({"device": "cuda:77"}, "cuda:77"),
        ({"dtype": "int3"}, "int3"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_are_refused_before_any_work(settings: dict[str, Any], told: str) -> None:
    def progress(*_: object) -> None:
        raise AssertionError("work began")

    with pytest.raises(ConfigError) as caught:
        check_models(**settings, progress=progress)
    assert told in str(caught.value)


def test_a_model_asked_for_by_name_that_is_not_there_is_refused() -> None:
    result = infer("--model", "no-such-model")
    assert result.exit_code == 2
    assert "no-such-model" in result.stderr
