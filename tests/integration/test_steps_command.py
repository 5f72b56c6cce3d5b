"""``infer trace --steps``: the chapter's requests, a learner's own code and its wrong line, and what it refuses."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.cli.trace_steps import write_course_run
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson
from shared.tracing.steps.page import write
from shared.tracing.steps.patches import applied
from tests.integration.infer_process import INFER
from tests.integration.trace_pages import traced
from tutorial.workshop.exercises import find_exercise, reference

ROOT = Path(__file__).parents[2]
LARGER = ("--max-seq-len", "256", "--num-gpu-blocks", "64")  # a token of a tiny model is a byte
CHUNKS = "shared/scheduling/chunks.py"
RIGHT = next(line for line in map(str.strip, reference(find_exercise("07x1"))[1].lines) if line.startswith("budget = "))


def recording(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    return values


def by_learner(model: str, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """The command on a workspace whose chunks have this line instead of the right one."""
    own = folder / "workspace" / CHUNKS
    own.parent.mkdir(parents=True)
    text = (ROOT / CHUNKS).read_text(encoding="utf-8")
    assert RIGHT in text
    own.write_text(text.replace(RIGHT, line), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"INFER_WORKSHOP": "1", "INFER_WORKSPACE": str(folder / "workspace"), "INFER_WORKSHOP_SAID": "1"}
    command = [*INFER, "trace", "--steps", "--phase", "07", "--model", model, *LARGER]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_requests_of_the_chapter_with_other_settings(model: str, tmp_path: Path) -> None:
    told = traced("--steps", "--phase", "07", "--model", model, *LARGER, "--max-tokens", "3", "--out", tmp_path)
    assert told.splitlines() == [f"wrote {tmp_path / name}" for name in ("steps.html", "steps.json")]
    found = recording(tmp_path)
    assert [each["id"] for each in found["requests"]] == list("ABCD")
    assert {each["max_tokens"] for each in found["requests"]} == {3}
    assert found["settings"]["num_gpu_blocks"] == 64
    assert found["settings"]["prefill_chunk_size"] == 12, "the chapter's"
    assert "ChunkedScheduler.schedule" in {each["name"] for each in found["functions"]}
    assert (tmp_path / "steps.html").read_text(encoding="utf-8") == write(found), "the page has the same recording"


def test_only_what_was_chosen_differs_from_the_chapter(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the device, which belongs to the machine."""

    def stop(lesson: Lesson, model: str, **settings: Any) -> None:
        raise ConfigError(", ".join(f"{name} {settings[name]}" for name in ("device", "max_batch_size", "block_size")))

    settings = {"device": "here", "max_batch_size": 99, "block_size": 64}
    monkeypatch.setattr("shared.cli.options.load_engine", stop)
    with pytest.raises(ConfigError, match=r"device here, max_batch_size \d, block_size 64"):
        write_course_run(find_lesson("07"), model, settings, {"block_size": 64}, Path())


def states_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The state after each event."""
    states, state = [], found["state"]
    for _, _, *patch in found["events"]:
        state = applied(state, patch[0]) if patch else state
        states.append(state)
    return states


def test_a_cpu_plans_attention_in_the_run_of_its_chapter(model: str, tmp_path: Path) -> None:
    larger = ("--max-seq-len", "1024", "--num-gpu-blocks", "80", "--max-tokens", "2")
    traced("--steps", "--phase", "06.1", "--model", model, *larger, "--out", tmp_path)
    batches = [state["batch"] for state in states_of(recording(tmp_path)) if "plan" in state.get("batch", {})]
    decoding = [(batch["ids"], batch["plan"]["decode"]["items"]) for batch in batches if "decode" in batch["plan"]]
    ids, items = decoding[0]
    assert ids == ["A", "B", "C"]
    assert len(items) > 3, "the keys of B are split"
    assert sorted({sequence for sequence, _, _ in items}) == [0, 1, 2]


def test_the_run_of_multi_token_prediction_has_masks_and_guesses(model: str, tmp_path: Path) -> None:
    larger = ("--max-seq-len", "128", "--num-gpu-blocks", "40", "--max-tokens", "8")
    traced("--steps", "--phase", "11.1", "--model", model, *larger, "--out", tmp_path)
    found = recording(tmp_path)
    states = states_of(found)
    items = [item for state in states for item in state.get("schedule", {}).get("items", ())]
    assert max(item.get("masks", 0) for item in items) == 3
    assert any("accepted" in each for state in states for each in state.get("drafts", {}).values())
    assert {"mask 1", "mask 2", "mask 3"} <= set(found["texts"].values())


def test_prompts_of_a_file(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("The capital\n</script><b>bold</b>\n", encoding="utf-8")
    options = ("--prompts", tmp_path / "prompts.txt", "--max-tokens", "2", "--out", tmp_path)
    traced("--steps", "--phase", "05", "--model", model, *options)
    assert [each["prompt"] for each in recording(tmp_path)["requests"]] == ["The capital", "</script><b>bold</b>"]
    assert "</script><b>" not in (tmp_path / "steps.html").read_text(encoding="utf-8")


def test_a_learners_wrong_line_is_seen(model: str, tmp_path: Path) -> None:
    wrong = "budget = max(self.config.max_num_batched_tokens - 5 * num_decoding, 1)"
    done = by_learner(model, tmp_path, wrong)
    assert done.returncode == 0, done.stderr
    found = recording(tmp_path / "trace")
    (sizes,) = [each for each in found["functions"] if each["name"] == "Chunks.sizes"]
    offset = next(n for n, line in enumerate(sizes["lines"]) if wrong in line)
    text = (tmp_path / "workspace" / CHUNKS).read_text(encoding="utf-8").splitlines()
    assert text[sizes["first"] - 1 + offset] == sizes["lines"][offset], "the learner's line, by its number"
    budgets = set()
    for (line, *_), state in zip(found["events"], states_of(found), strict=True):
        function, at, depth, _ = found["lines"][line]
        if found["functions"][function] is sizes and at == offset:
            budgets.add(state["variables"][str(depth)]["budget"])
    assert budgets & {"11", "6", "1"}, "16 - 5, which is wrong: it would be 15, 14, 13"


def test_a_learners_line_that_raises_ends_the_recording_there(model: str, tmp_path: Path) -> None:
    done = by_learner(model, tmp_path, "budget = max(self.config.max_num_batched_token - num_decoding, 1)")
    assert done.returncode == 2
    assert "The recording ends early" in " ".join(done.stderr.split())
    found = recording(tmp_path / "trace")
    assert found["error"].startswith("the last step raised AttributeError: ")
    last = [found["lines"][line] for line, *_ in found["events"]][-9:]
    assert "max_num_batched_token -" in " ".join(found["functions"][f]["lines"][at] for f, at, *_ in last)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--compare", "static,continuous"], "leave one of them out"),
        (["--phase", "03"], "runs one request at a time"),
        (["--requests", "257"], "shows 1 to 256"),
    ],
)
def test_what_it_refuses(arguments: list[str], told: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "--steps", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
