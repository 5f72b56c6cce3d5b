"""``infer trace``, once as a process of its own: what it says and writes, and what it refuses."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.cli.options import FIELDS
from shared.cli.trace import _variants
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from tests.integration.infer_process import INFER
from tests.integration.trace_pages import WORK, page_data, traced

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two files of a run under two schedulers."""
    folder = tmp_path_factory.mktemp("traced")
    command = [*INFER, "trace", "--model", model, *WORK, "--compare", "static,continuous", "--out", "a/b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "told.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def traces(written: Path) -> list[dict[str, Any]]:
    """The data of the page."""
    return page_data(written / "a/b/trace.html")


def test_what_the_command_says(written: Path, traces: list[dict[str, Any]]) -> None:
    told = (written / "told.txt").read_text()
    assert re.search(r"static +continuous", told)
    for trace, column in zip(traces, (1, 2), strict=True):
        assert trace["settings"]["batching mode"] == trace["title"]
        busy = [s for s in trace["steps"] if s["num_running"] or s["num_waiting"] or s["prefilled"] or s["decoded"]]
        served = sum(len(step["prefilled"]) + len(step["decoded"]) for step in busy)
        rows = [re.split(r"  +", line.strip()) for line in told.splitlines()]
        assert [row[column] for row in rows if row[0] == "batch utilisation"] == [f"{served / (2 * len(busy)):.1%}"]
    assert told.splitlines()[-2:] == ["wrote a/b/trace.html", "wrote a/b/trace.json"]
    assert str(ROOT) not in (written / "a/b/trace.html").read_text()


def test_both_schedulers_had_the_same_requests_and_gave_the_same_answers(traces: list[dict[str, Any]]) -> None:
    static, continuous = (
        [
            (r["request_id"], r["arrival_step"], r["num_prompt_tokens"], [token[1:] for token in r["tokens"]])
            for r in trace["requests"]
        ]
        for trace in traces
    )
    assert static == continuous
    assert [request[0] for request in static] == list("1234567")
    assert all(tokens for *_, tokens in static)
    assert len(traces[0]["steps"]) > len(traces[1]["steps"])


CLOCK = ("ts", "dur", "told")  # the sentences of a page say milliseconds; a test of theirs fixes the clock


def test_a_seed_gives_the_same_files_but_for_the_clock(model: str, written: Path, tmp_path: Path) -> None:
    traced("--model", model, *WORK, "--compare", "static,continuous", "--out", tmp_path)

    def timeless(path: Path) -> tuple[object, object]:
        def without(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: without(v) for k, v in value.items() if not k.endswith("_ns") and k not in CLOCK}
            return [without(each) for each in value] if isinstance(value, list) else value

        return without(page_data(path / "trace.html")), without(json.loads((path / "trace.json").read_text()))

    assert timeless(written / "a/b") == timeless(tmp_path)


def test_prompts_from_a_file_are_answered_as_generate_does(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("The capital\r\n \n</script><b>bold</b>\nä\n".encode())
    options = ("--max-tokens", "6", "--every", "2", "--scheduler-policy", "prefill_first", "--out", tmp_path / "out")
    traced("--model", model, "--prompts", tmp_path / "prompts.txt", *options)
    (trace,) = page_data(tmp_path / "out/trace.html")
    assert trace["title"] == "continuous, prefill_first"
    assert [(r["request_id"], r["prompt"], r["arrival_step"]) for r in trace["requests"]] == [
        ("1", "The capital", 0),
        ("3", "</script><b>bold</b>", 2),
        ("4", "ä", 4),
    ]
    engine = find_lesson("05").engine(EngineConfig(model=model, seed=0))
    for request in trace["requests"]:
        alone = list(engine.generate(request["prompt"], SamplingParams(temperature=0.0, max_new_tokens=6)))
        assert [token[1] for token in request["tokens"]] == [output.token_id for output in alone]
        assert request["finish_reason"] == alone[-1].finish_reason
    events = json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert named == ["steps", "host", "request 1", "request 3", "request 4"]


def test_the_phase_before_has_its_own_way_to_batch(model: str, tmp_path: Path) -> None:
    traced("--model", model, "--phase", "04", *WORK, "--out", tmp_path)
    (trace,) = page_data(tmp_path / "trace.html")
    assert (trace["title"], trace["settings"]["phase"]) == ("static", "04")
    assert "policy" not in trace["settings"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--requests", "257"], "shows 1 to 256"),
        (["--rate", "0"], "The rate is 0.0"),
        (["--rate", "1", "--every", "1"], "give one of them"),
        (["--rate", "1e-9"], "room for 10000 steps"),
        (["--phase", "03"], "runs one request at a time"),
        (["--phase", "04", "--compare", "static,continuous"], "arrives in phase 05"),
        (["--compare", "static"], "two or more different"),
        (["--compare", "static,lifo"], "must be two or more different ones of static, continuous, fcfs"),
        (["--compare", "static,continuous", "--batching-mode", "static"], "leave the others out"),
        (["--compare", "contiguous,paged", "--kv-cache-backend", "paged"], "leave the others out"),
        (["--compare", "waiting,overlapped", "--no-overlap-scheduling"], "or --overlap-scheduling is given too"),
        (["--phase", "08", "--compare", "waiting,overlapped"], "arrives in phase 09"),
        (["--num-gpu-blocks", "3", "--block-size", "8", "--max-seq-len", "32"], "is 4 blocks"),
        (["--prompts", "nowhere.txt"], "No such file"),
        (["--prompts", "empty.txt"], "contains no text"),
        (["--prompts", "latin.txt"], "no UTF-8 text (byte 1)"),
        (["--prompts", "good.txt", "--requests", "3"], "leave --requests out"),
        (["--prompts", "good.txt", "--shared-prefix", "8"], "leave --shared-prefix out"),
        (["--shared-prefix", "-1"], "The shared prefix has -1 tokens; it must have 0 to 510"),
        (["--shared-prefix", "63", "--max-seq-len", "64"], "must have 0 to 62"),
        (["--documents", "3"], "has no segments; add --phase 09.1"),
        (["--prompts", "many.txt"], "--prompts holds 257 prompts"),
        (["--prompts", "good.txt", "--max-seq-len", "4"], "Line 2: This model's maximum context length is 4"),
        (["--out", "good.txt"], "cannot be a folder"),
        (["--model", "nowhere/at-all/it"], "nowhere/at-all/it"),
        (["--model", "tiny-qwen3"], "tiny-qwen3 has no config.json"),  # a folder, though it has the name of a shape
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_paragraph(
    model: str, arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(*_: object) -> None:
        raise AssertionError("a step was run")

    monkeypatch.setattr("shared.tracing.recorder.Recorder.step", ran)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("\na good prompt\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"g\xe4\xff")
    (tmp_path / "many.txt").write_text("x\n" * 257)
    (tmp_path / "tiny-qwen3").mkdir()
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["trace", "--model", model, *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert set(tmp_path.iterdir()) - set(before) <= {tmp_path / "trace"}


@pytest.mark.parametrize(("num_blocks", "num_regions", "as_many"), [(None, 4, 25), (20, 3, 19), (2, 1, 7)])
def test_blocks_and_regions_that_are_compared_hold_the_same(
    num_blocks: int | None, num_regions: int, as_many: int
) -> None:
    """A region is for a longest sequence; in blocks, all requests may run at once."""
    own = {"max_seq_len": 100, "block_size": 16, "max_batch_size": 4, "num_gpu_blocks": num_blocks}
    settings = {name: field.default for name, field in FIELDS.items()} | own
    (_, regions), (_, blocks) = _variants("contiguous, paged", settings, 6)
    others = {name: value for name, value in settings.items() if name not in ("block_size", "num_gpu_blocks")}
    assert regions == others | {"kv_cache_backend": "contiguous", "max_batch_size": num_regions}
    assert blocks == settings | {"kv_cache_backend": "paged", "max_batch_size": 6, "num_gpu_blocks": as_many}


def test_documents_are_segments_with_rows_of_their_own(model: str, tmp_path: Path) -> None:
    arguments = ["trace", "--model", model, "--phase", "09.1", "--documents", "3", "--requests", "4"]
    done = CliRunner().invoke(app, [*arguments, "--max-tokens", "3", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (trace,) = page_data(tmp_path / "trace.html")
    computed = {name for step in trace["steps"] for name, _ in step["prefilled"] if name.startswith("segment ")}
    assert 2 <= len(computed) <= 3, "each document that is chosen, once"
    assert re.search(r"prompt tokens from the cache +384 of ", done.stdout), "two documents of 48 for each of four"


def test_without_a_model_a_tiny_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_MODEL", raising=False)
    done = CliRunner().invoke(app, ["trace", "--requests", "2", "--max-tokens", "3", "--out", str(tmp_path / "traced")])
    assert done.exit_code == 0, done.output
    (trace,) = page_data(tmp_path / "traced/trace.html")
    assert [len(request["tokens"]) > 0 for request in trace["requests"]] == [True, True]
    assert "infer trace · tiny-llama" in (tmp_path / "traced/trace.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["traced"], "the model is not kept"
