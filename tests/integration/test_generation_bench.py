"""The generation benchmark on a tiny model: a real measurement, and the counts and sums that hold for any machine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch.autograd import DeviceType
from typer.testing import CliRunner

from benchmarks.bench_generation import GenerationSize, measure_generation
from benchmarks.contenders import MIN_DECODED, held_tensors, storage_bytes
from benchmarks.generation.results import limit_bytes
from benchmarks.generation.step_trace import TraceWindow, read_events
from benchmarks.generation.transformers_peer import TransformersPeer
from benchmarks.hardware import Ceilings
from benchmarks.report import Report, read_value
from benchmarks.roofline import DecodeWork
from benchmarks.timing import run
from benchmarks.views.generation import head, markdown, print_generation
from benchmarks.views.generation_figure import save_figure
from phases.phase_03.engine import Engine
from shared.cache.contiguous import kv_bytes
from shared.cli import app
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError, RequestError
from shared.lessons import newest_lesson
from shared.loading.config_json import read_config
from shared.sampling.params import SamplingParams

SIZE = GenerationSize(prompt_tokens=7, new_tokens=6, trials=2, window=3)
CEILINGS = Ceilings(2e9, 1e9, 1e10, None, None, "float32", 1 << 26)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["gemma3_text"]


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return measure_generation(str(folder), phases=["02", "03"], size=SIZE, ceilings=CEILINGS, threads=1)


def test_each_contender_answers_the_same_in_full(report: Report) -> None:
    assert report.flags["contenders"] == ["02", "03", "transformers_eager"]
    for name in report.flags["contenders"]:
        result = report.results[name]
        assert result["new_tokens"] == result["equal_tokens"] == result["compared_tokens"] == SIZE.new_tokens, name
        assert len(result["decode_tokens_per_second_trials"]) == SIZE.trials
        assert result["time_to_first_token_ms"] > 0
        assert result["ms_per_token"] > 0
    assert report.results["02"]["tokens_computed"] == sum(range(7, 7 + 6))
    assert report.results["03"]["tokens_computed"] == 7 + 5
    assert report.results["transformers_eager"]["tokens_computed"] == 7 + 5


def test_the_share_is_of_the_bytes_that_a_token_must_read(report: Report, folder: Path) -> None:
    work = DecodeWork(read_config(folder), torch.float32)
    needed = limit_bytes(work, 7, 6)
    # Five decode steps see 8 to 12 tokens, fewer than the window of 16; the tied head is the embedding.
    assert needed == work.resident_bytes + 10 * work.kv_bytes_per_token
    limit = report.results["limit"]
    assert limit["weights_bytes_per_token"] + limit["kv_bytes_per_token"] == needed
    assert limit["us_per_token"] == pytest.approx(1e6 * needed / 1e9, rel=1e-3)
    assert limit["tokens_per_second"] == pytest.approx(1e9 / needed, rel=1e-3)
    for name in report.flags["contenders"]:
        result = report.results[name]
        expected = result["decode_tokens_per_second"] / limit["tokens_per_second"]
        assert result["share_of_bandwidth"] == pytest.approx(expected, rel=2e-3)


def test_memory_is_split_to_the_byte(report: Report, folder: Path) -> None:
    config = read_config(folder)
    weights = DecodeWork(config, torch.float32).resident_bytes
    for name in report.flags["contenders"]:
        assert report.results[name]["memory_weights_bytes"] == weights
        assert report.results[name]["memory_other_bytes"] >= 0
    assert report.results["02"]["memory_kv_bytes"] == 0
    assert report.results["03"]["memory_kv_bytes"] == kv_bytes(config, 7 + 6, torch.float32)
    assert report.results["transformers_eager"]["memory_kv_bytes"] is None
    # Both engines hold the same tables beside, one for each RoPE.
    assert report.results["02"]["memory_other_bytes"] == report.results["03"]["memory_other_bytes"] > 0


def test_what_only_a_gpu_has_is_absent_on_a_cpu(report: Report) -> None:
    for name in report.flags["contenders"]:
        result = report.results[name]
        assert result["kernel_us_per_token"] is result["kernels_per_token"] is result["host_launches_per_token"] is None
        assert result["own_launches_per_token"] == 0
    assert report.flags["is_demo_size"]
    assert "demo size (no GPU)" in head(report)


def test_ratios_are_of_trials_and_ours_stand_above(report: Report) -> None:
    trials = {name: report.results[name]["decode_tokens_per_second_trials"] for name in report.flags["contenders"]}
    assert set(report.results["ratios"]) == {
        "03_over_02",
        "02_over_transformers_eager",
        "03_over_transformers_eager",
    }
    pairs = zip(trials["03"], trials["02"], strict=True)
    assert report.results["ratios"]["03_over_02"] == pytest.approx(sum(a / b for a, b in pairs) / 2, rel=2e-3)


def test_the_report_knows_its_run_and_no_path(report: Report, folder: Path) -> None:
    content = report.to_dict()
    assert content["engines"]["03"]["max_seq_len"] == 13
    assert content["engines"]["transformers_eager"]["generate"] == {"do_sample": False, "attention": "sdpa"}
    assert str(folder.parent) not in json.dumps(content)


def test_an_answer_that_takes_too_long_breaks_off_and_is_judged_by_what_it_has(folder: Path) -> None:
    size = GenerationSize(prompt_tokens=4, new_tokens=30, trials=1, window=2)
    found = measure_generation(
        str(folder), phases=["02"], size=size, ceilings=CEILINGS, max_seconds=1e-9, with_transformers=True
    )
    ours, theirs = found.results["02"], found.results["transformers_eager"]
    assert ours["new_tokens"] == theirs["new_tokens"] == MIN_DECODED + 1
    assert ours["tokens_computed"] == sum(range(4, 4 + MIN_DECODED + 1))
    assert theirs["tokens_computed"] == 4 + MIN_DECODED
    assert (theirs["equal_tokens"], theirs["compared_tokens"]) == (MIN_DECODED + 1, MIN_DECODED + 1)


def test_the_default_is_the_uncached_the_cached_and_the_newest(folder: Path) -> None:
    size = GenerationSize(3, 3, 1, 1)
    found = measure_generation(str(folder), size=size, with_transformers=False, ceilings=CEILINGS)
    assert found.flags["contenders"] == sorted({"02", "03", newest_lesson().number})


def with_kernels(report: Report) -> Report:
    """The report as a GPU would fill it."""
    results = dict(report.results)
    for name in report.flags["contenders"]:
        kernel_us = 400 * results[name]["ms_per_token"]
        seen = {"kernel_us_per_token": kernel_us, "kernel_share_of_bandwidth": 0.5, "kernels_per_token": 131.0}
        results[name] = results[name] | seen | {"copies_per_token": 2.0, "host_launches_per_token": 133.0}
    return Report("generation", report.model, report.engines, 0, report.flags | {"is_demo_size": False}, results)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_tables_show_every_contender(report: Report, has_gpu: bool) -> None:
    shown = with_kernels(report) if has_gpu else report
    console = Console(width=120, record=True, force_terminal=True)
    print_generation(shown, console)
    screen, page = console.export_text(), markdown(shown)
    for text in (screen, page):
        assert text.count("transformers, eager") == (3 if has_gpu else 2)
        assert ("Work on the GPU" in text) == has_gpu
        assert ("131" in text) == has_gpu
        assert "03 over 02" in text
        assert ("demo size" in text) != has_gpu


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_figure_is_a_picture(report: Report, tmp_path: Path, has_gpu: bool) -> None:
    save_figure(with_kernels(report) if has_gpu else report, tmp_path / "figure.png")
    pixels = imread(tmp_path / "figure.png")
    assert (pixels.shape[1] > 1500) == has_gpu
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01
    assert (pixels[..., 3] == 1).all()


def test_transformers_answers_as_its_users_get_it(tiny_checkpoints: dict[str, Path]) -> None:
    """And past an end of sequence: the folder names end ids, and the answer is as long as was asked."""
    folder = tiny_checkpoints["llama"]
    peer = TransformersPeer(folder, torch.float32, CPU)
    answer = peer.run("eager", [7, 300, 42], 40)
    assert len(answer.token_ids) == len(answer.times) == 40
    assert answer.token_ids == run(Engine(EngineConfig(model=str(folder))), [7, 300, 42], 40).token_ids
    assert answer.times == sorted(answer.times)
    cut = peer.run("eager", [7, 300, 42], 40, lambda times: len(times) == 5)
    assert cut.token_ids == answer.token_ids[:5]
    settings = peer.settings("compiled")
    assert settings["cache_implementation"] == "static"
    assert settings["compile_config"]["mode"] == "reduce-overhead"


def test_a_window_traces_its_steps_and_no_others(folder: Path) -> None:
    """One matrix product a projection: their count says how many steps were seen."""
    engine = Engine(EngineConfig(model=str(folder)))
    window = TraceWindow(first=2, steps=3, device=CPU)
    outputs = engine.generate([7] * 5, SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True))
    open_after = [window.token() for _ in outputs]
    assert open_after == [True] * 4 + [False] * 5
    products = {call.name: call.count for call in window.result.operations}["aten::linear"]
    layers = engine.model.config.num_layers
    assert products == 3 * (7 * layers + 1)
    assert window.result.steps == 3
    assert window.result.host_us_per_token > 0


def test_an_answer_that_ends_inside_the_window_says_so() -> None:
    window = TraceWindow(first=1, steps=3, device=CPU)
    window.token()
    window.token()
    with pytest.raises(ValueError, match="ended after 2 tokens"):
        _ = window.result
    window.token()
    window.token()


def event(name: str, kind: DeviceType, microseconds: float, **more: Any) -> SimpleNamespace:
    span = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(
        name=name, device_type=kind, time_range=span, self_cpu_time_total=microseconds, is_user_annotation=False, **more
    )


def test_events_are_sorted_into_kernels_copies_and_the_hosts_calls() -> None:
    mark = event("decode", DeviceType.CUDA, 999.0)
    mark.is_user_annotation = True
    events = [
        event("gemv", DeviceType.CUDA, 5.0),
        event("gemv", DeviceType.CUDA, 7.0),
        event("norm", DeviceType.CUDA, 20.0),
        event("Memcpy HtoD (Pageable -> Device)", DeviceType.CUDA, 1.5),
        event("Memset (Device)", DeviceType.CUDA, 0.5),
        mark,
        event("ProfilerStep#1", DeviceType.CUDA, 999.0),
        event("cudaLaunchKernel", DeviceType.CPU, 2.0),
        event("cudaLaunchKernelExC", DeviceType.CPU, 2.0),
        event("cuLaunchKernelEx", DeviceType.CPU, 2.0),
        event("cudaGraphLaunch", DeviceType.CPU, 2.0),
        event("cudaStreamSynchronize", DeviceType.CPU, 500.0),
        event("cudaDeviceSynchronize", DeviceType.CPU, 500.0),
        event("aten::mm", DeviceType.CPU, 4.0),
    ]
    trace = read_events(events, steps=2, seconds=1e-3, own_launches=2)
    assert [(k.name, k.count, k.microseconds) for k in trace.kernels] == [("norm", 1, 20.0), ("gemv", 2, 12.0)]
    assert trace.kernel_us_per_token == 16.0
    assert sum(copy.count for copy in trace.copies) == 2
    assert trace.host_launches == 4
    assert trace.host_us_per_token == (4 * 2.0 + 4.0) / 2


def test_memory_behind_views_counts_once() -> None:
    base = torch.zeros(100)
    holder = SimpleNamespace(a=base, rows=[base[10:20], base.view(10, 10)], other={"x": (torch.zeros(5),)}, name="n")
    holder.itself = holder
    assert storage_bytes(held_tensors(holder)) == 4 * 105


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"size": GenerationSize(0, 6, 1, 1)}, ConfigError, "prompt_tokens is 0"),
        ({"size": GenerationSize(5, 2, 1, 1)}, ConfigError, "new_tokens is 2"),
        ({"size": GenerationSize(5, 6, 0, 1)}, ConfigError, "trials is 0"),
        ({"size": GenerationSize(5, 6, 1, 0)}, ConfigError, "window is 0"),
        ({"size": GenerationSize(2040, 9, 1, 1)}, RequestError, "2048 tokens"),
        ({"phases": ["01a"]}, ConfigError, "generates no text"),
        ({"phases": ["99"]}, ConfigError, "99"),
        ({"phases": []}, ConfigError, "No phase"),
        ({"threads": 0}, ConfigError, "threads is 0"),
        ({"seed": -1}, ConfigError, "seed is -1"),
        ({"max_seconds": 0.0}, ConfigError, "max_seconds is 0"),
        ({"dtype": "int3"}, ConfigError, "int3"),
        ({"device": "cuda:77"}, ConfigError, "cuda:77"),
        ({"with_compiled": True}, ConfigError, "on a GPU alone"),
    ],
)
def test_bad_settings_are_refused_before_any_work(
    folder: Path, settings: dict[str, Any], error: Any, told: str
) -> None:
    def progress(*_: object) -> None:
        raise AssertionError("work began")

    with pytest.raises(error) as caught:
        measure_generation(str(folder), **{"size": SIZE, **settings}, progress=progress)
    assert told in str(caught.value)


def test_contenders_too_large_for_the_memory_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1000))
    with pytest.raises(CapacityError, match=r"3 contenders.*--no-transformers"):
        measure_generation(str(folder), phases=["02", "03"], size=SIZE)


def test_the_command_prints_json_last_and_writes_the_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.hardware.measure_ceilings", lambda device: CEILINGS)
    arguments = ["--model", folder, "--phase", "3", "--no-transformers", "--prompt-tokens", 4, "--new-tokens", 3]
    arguments += ["--trials", 1, "--window", 1, "--threads", 1, "--device", "cpu", "--out", tmp_path / "reports"]
    result = CliRunner().invoke(app, ["bench", "generation", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert list(line["results"]) == ["03", "ratios", "limit", "ceilings"]
    assert line["results"]["ratios"] == {}
    assert line["results"]["ceilings"]["read_gb_per_second"] == 1.0
    stem = f"generation-tiny-gemma3-{line['machine']}"
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {stem + e for e in (".json", ".md", ".png")}
    assert read_value(tmp_path / "reports" / f"{stem}.json", "results.03.tokens_computed") == 4 + 2


@pytest.mark.parametrize(
    "arguments",
    [["--model", "no-such-model"], ["--phase", "01a"], ["--trials", "0"], ["--prompt-tokens", "2048"]],
)
def test_the_command_refuses_in_one_paragraph(folder: Path, arguments: list[str]) -> None:
    given = ["bench", "generation", "--model", str(folder), "--device", "cpu", *arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert arguments[1] in result.output


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_seen(folder: Path) -> None:
    size = GenerationSize(prompt_tokens=16, new_tokens=12, trials=1, window=4)
    found = measure_generation(str(folder), size=size, device="cuda", with_compiled=False)
    for name in found.flags["contenders"]:
        result = found.results[name]
        assert result["kernels_per_token"] > 10
        assert result["kernel_us_per_token"] > 0
        assert result["memory_other_bytes"] > 0
    assert found.results[newest_lesson().number]["own_launches_per_token"] > 10
    assert found.results["03"]["own_launches_per_token"] == 0
