"""The sanity check: sound models pass in every phase, a broken one is a row, and a wrong answer is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import sanity_check
from benchmarks.sanity_check import check_models, find_subjects, problem, view
from benchmarks.view import markdown
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.errors import ConfigError, ModelFolderError

PHASES = ["02", "03"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_sound_models_pass_in_every_phase(tiny_checkpoints: dict[str, Path], dtype: str | None) -> None:
    folders = [str(folder) for folder in tiny_checkpoints.values()]
    report = check_models(models=folders, phases=PHASES, new_tokens=8, dtype=dtype, threads=1)
    rows, names = report.results["rows"], [folder.name for folder in tiny_checkpoints.values()]
    assert [(row["model"], row["phase"]) for row in rows] == [(name, number) for name in names for number in PHASES]
    assert report.results["num_failed"] == 0, rows
    assert all(row["num_tokens"] == 8 and (row["flips"] == 0 or dtype == "bfloat16") for row in rows)


def test_a_broken_folder_is_a_row_beside_a_shape_that_is_made_and_removed(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, made = tmp_path / "[red]cut", tmp_path / "made"
    made.mkdir()
    shutil.copytree(tiny_checkpoints["llama"], cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    monkeypatch.setenv("INFER_TEST_MODELS", ",".join(map(str, (cut, tmp_path / "empty", tmp_path / "missing"))))
    monkeypatch.setattr(sanity_check, "KNOWN_MODELS", {})
    monkeypatch.setattr(sanity_check, "SHAPES", {"tiny-gemma3": SHAPES["tiny-gemma3"]})
    arguments = ["--phase", "03", "--new-tokens", "3", "--device", "cpu", "--threads", "1"]
    result = CliRunner().invoke(app, ["bench", "sanity", *arguments])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    assert (found["num_failed"], found["num_checked"]) == (3, 4)
    problems = {row["model"]: row["problem"] for row in found["rows"]}
    assert problems["tiny-gemma3"] is None
    assert problems["[red]cut"]
    assert "config.json" in problems["empty"]
    assert "missing" in problems["missing"]
    assert str(tmp_path) not in json.dumps(found)
    assert "[red]cut" in result.stdout  # markup stays text
    assert not list(made.glob("infer-sanity-*"))


def test_a_wrong_answer_is_found_and_shown(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (wrong["flips"], wrong["shortfall"] > 1) == (1, True)
    assert all(told in markdown(view(report)) for told in ("below transformers' likeliest", "1 of 2 failed."))


def test_without_choice_everything_at_hand_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.setenv("INFER_TEST_MODELS", str(tmp_path / "mine"))
    for device, is_tiny in (("cpu", True), ("cuda", False)):
        shapes = [name for name in SHAPES if name.startswith("tiny-") == is_tiny]
        assert [name for name, _ in find_subjects(None, None, 0, device)] == ["mine", *shapes]
    assert [name for name, _ in find_subjects(None, ["tiny-llama"], 0, "cpu")] == ["tiny-llama"]


def test_problems_name_no_folder_of_the_machine() -> None:
    error = ModelFolderError("/home/someone/models/mine has no config.json\nmore; fetch it.")
    assert problem(error) == "mine has no config.json"
    assert problem(RuntimeError("3 tokens/s and owner/name stay")) == "RuntimeError: 3 tokens/s and owner/name stay"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"new_tokens": 65}, "new_tokens is 65"),
        ({"phases": ["01b"]}, "generates no text"),
        ({"shapes": ["huge"]}, "no shape 'huge'"),
        ({"models": ["no-such-model"]}, "no-such-model"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_are_refused_before_any_work(settings: dict[str, Any], told: str) -> None:
    def progress(*_: object) -> None:
        raise AssertionError("work began")

    with pytest.raises((ConfigError, ModelFolderError)) as caught:
        check_models(**settings, progress=progress)
    assert told in str(caught.value)
