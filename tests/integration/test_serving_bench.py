"""The serving benchmark on tiny models: real engines, a real server, and the counts that hold for any machine."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.bench_serving import default_size, measure_serving
from benchmarks.report import Report, read_value
from benchmarks.run_matrix import run_matrix
from benchmarks.serving.engine_load import OneAtATime, drive
from benchmarks.serving.experiments import RUN
from benchmarks.serving.lineup import lineup
from benchmarks.serving.load_generator import generate_load
from benchmarks.serving.padded_baseline import PaddedEngine
from benchmarks.serving.served_process import MODEL, ServedProcess, served
from benchmarks.views.matrix import markdown as matrix_markdown
from benchmarks.views.serving import all_runs, markdown, print_serving, tables
from benchmarks.views.serving_figure import save_figure
from benchmarks.workloads.serving import DEMO, ServingSize, Trace, TraceRequest, Workload, make_trace
from phases.phase_03.engine import Engine as Plain
from phases.phase_05.engine import Engine as Continuous
from shared.cache.contiguous import kv_bytes
from shared.cli import app
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError, RequestError
from shared.lessons import newest_lesson
from shared.loading.config_json import read_config

ROOT = Path(__file__).parents[2]
VOCABULARY = 300
BATCHED = lineup().continuous
"""Contenders that batch continuously: in regions, in blocks, and by the newest phase."""
SIZE = ServingSize(
    max_batch_size=3,
    w1=Workload("w1", "W1 single", 1, 1, (6, 6), (5, 5)),
    w2=Workload("w2", "W2 mixed", 5, 3, (4, 20), (2, 6)),
    w3=Workload("w3", "W3 shared prefix", 4, 3, (10, 12), (2, 3), shared_prefix_tokens=8),
    backlog=Workload("backlog", "Closed loop", 8, 6, (4, 9), (2, 6)),
    tail=Workload("tail", "Tail", 6, 6, (4, 9), (2, 6)),
    together=Workload("together", "4 at once", 4, 4, (4, 9), (3, 3)),
    streams=Workload("streams", "4 streams", 4, 4, (4, 9), (3, 3)),
    capacity=Workload("capacity", "Capacity", 16, 16, (4, 20), (4, 12)),
    wide_slots=(2, 96),
    trials=2,
)


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    """Every experiment."""
    return measure_serving(str(folder), size=SIZE, threads=1, clients=1)


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[ServedProcess]:
    options = ["--device", "cpu", "--max-seq-len", "64", "--max-batch-size", "3"]
    with served(newest_lesson(), folder, options, clients=1) as running:
        yield running


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_the_padded_baseline_gives_the_plain_loops_tokens(tiny_checkpoints: dict[str, Path], family: str) -> None:
    """In batches of three, of prompts of 3 to 40 tokens, more than Gemma's window, and answers of 1 to 9."""
    config = EngineConfig(model=str(tiny_checkpoints[family]), max_seq_len=64)
    lengths = [(40, 9), (3, 1), (17, 5), (8, 4), (25, 8)]
    rows = make_trace(Workload("padded", "Padded", 5, 5, (40, 40), (9, 9)), VOCABULARY, seed=0).requests
    requests = [TraceRequest(row.prompt_ids[:n], new) for row, (n, new) in zip(rows, lengths, strict=True)]
    trace = Trace(tuple(requests), concurrency=5)
    padded = PaddedEngine(replace(config, max_batch_size=3))
    run = drive(padded, trace)
    plain = drive(OneAtATime(Plain(config)), trace)
    assert [r.token_ids for r in run.requests] == [r.token_ids for r in plain.requests]
    assert [len(r.token_ids) for r in run.requests] == [new for _, new in lengths]
    # Three rows of the longest prompt and of the longest answer's decoding; then two.
    assert padded.num_tokens_computed == 3 * (40 + 8) + 2 * (25 + 7)
    assert run.num_forwards == 9 + 8
    assert [len(step.record.decoded) for step in run.steps][1:9] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert not padded.has_work()


def test_the_padded_baseline_holds_no_more_columns_than_it_has(folder: Path) -> None:
    padded = PaddedEngine(EngineConfig(model=str(folder), max_seq_len=30, max_batch_size=3))
    eleven: Any = SimpleNamespace(max_new_tokens=11)
    with pytest.raises(RequestError, match="30 columns"):
        padded.add_request([1] * 20, eleven, "0")
    # 20 columns of prompt and 20 of answer do not go into one rectangle, so the two take turns.
    trace = Trace((TraceRequest((5,) * 20, 3), TraceRequest((5,) * 4, 20)), concurrency=2)
    run = drive(padded, trace)
    assert [len(r.token_ids) for r in run.finished] == [3, 20]
    assert run.num_forwards == 3 + 20
    padded.add_request([1, 2], eleven, "a")
    assert padded.abort("a")
    assert not padded.abort("a")
    assert not padded.has_work()


def test_every_contender_serves_the_same_trace_to_its_end(report: Report) -> None:
    traces = {name: make_trace(w, VOCABULARY, 0) for name, w in SIZE.workloads.items()}
    for name, trace in traces.items():
        runs = report.results["workloads"][name]
        assert list(runs) == ["sequential", "padded", "static", *BATCHED, "http"]
        for contender, run in runs.items():
            assert run["num_finished"] == run["num_requests"] == len(trace.requests), (name, contender)
            assert run["num_errors"] == 0
            assert run["output_tokens"] == trace.new_tokens
            assert run["request_latency_ms"]["p50"] >= run["time_to_first_token_ms"]["p50"] > 0
            assert run["queue_wait_ms"]["p99"] >= 0
            assert not run["is_cut"]
        prompts = sum(len(r.prompt_ids) for r in trace.requests)
        least = prompts + trace.new_tokens - len(trace.requests)
        assert {runs[c]["tokens_computed"] for c in ("sequential", "static", *BATCHED)} == {least}
        assert {runs[c]["preemptions"] for c in BATCHED} == {0}, "there is memory for all"
        assert runs["padded"]["tokens_computed"] >= least
        assert runs["sequential"]["forward_passes"] == trace.new_tokens
        assert runs["sequential"]["slot_utilisation"] == 1
        assert runs["sequential"]["gain"] == 1
        assert runs["padded"]["forward_passes"] == runs["static"]["forward_passes"] == runs["static"]["steps"]
        assert runs["http"]["forward_passes"] > 0
        assert runs["http"]["steps"] is None
    w2 = report.results["workloads"]["w2"]
    assert w2["continuous"]["forward_passes"] < w2["sequential"]["forward_passes"]
    assert w2["padded"]["tokens_computed"] > w2["static"]["tokens_computed"], "padding is computed"


def test_a_static_batch_takes_as_many_steps_as_its_longest_answers(report: Report) -> None:
    answers = [r.new_tokens for r in make_trace(SIZE.w2, VOCABULARY, 0).requests]
    static = report.results["workloads"]["w2"]["static"]
    assert static["steps"] == max(answers[:3]) + max(answers[3:])
    assert static["slot_utilisation"] == pytest.approx(sum(answers) / (3 * static["steps"]), rel=1e-3)
    assert report.results["workloads"]["w2"]["continuous"]["slot_utilisation"] >= static["slot_utilisation"]


def test_nobody_starves_under_any_policy(report: Report) -> None:
    policies = report.results["policies"]
    assert set(policies) == {"w2", "w3"}
    for runs in policies.values():
        assert list(runs) == ["fcfs", "prefill_first", "decode_round_robin"]
        assert all(run["decode_stalls"] == run["requests_overtaken"] == 0 for run in runs.values())
        assert len({run["output_tokens"] for run in runs.values()}) == 1


def test_the_tails_rate_is_a_share_of_what_static_can_do_in_the_same_run(report: Report) -> None:
    loop, tail = report.results["closed_loop"], report.results["tail"]
    answers = [r.new_tokens for r in make_trace(SIZE.backlog, VOCABULARY, 0).requests]
    capacity = loop["static"]["saturated_tokens_per_second"] * len(answers) / sum(answers)
    assert loop["static_capacity_requests_per_second"] == pytest.approx(capacity, rel=1e-3)
    assert tail["rate_requests_per_second"] == pytest.approx(0.8 * capacity, rel=1e-3)
    over, under = (tail[name]["queue_wait_ms"]["p99"] for name in ("continuous", "static"))
    assert tail["continuous_over_static_p99_queue_wait"] == pytest.approx(over / under, rel=1e-2)
    trials = [loop[name]["tokens_per_second_trials"] for name in ("continuous", "static")]
    ratios = [mine / other for mine, other in zip(*trials, strict=True)]
    assert loop["continuous_over_static_saturated_trials"] == pytest.approx(ratios, rel=1e-2)
    assert loop["continuous_over_static_saturated"] == pytest.approx(statistics.median(ratios), rel=1e-2)
    assert loop["static"]["saturated_tokens_per_second"] == pytest.approx(statistics.median(trials[1]), rel=1e-2)
    assert tail["static"]["num_finished"] == tail["continuous"]["num_finished"] == 6
    for name in BATCHED:
        share = loop[name]["output_tokens_per_second"] / loop["static"]["output_tokens_per_second"]
        assert loop[f"{name}_over_static_output"] == pytest.approx(share, rel=1e-2)


def test_all_at_once_goes_into_one_batch(report: Report) -> None:
    assert list(report.results["together"]) == ["static", *BATCHED]
    for run in report.results["together"].values():
        assert (run["steps"], run["forward_passes"], run["slot_utilisation"]) == (3, 3, 1.0)


def test_the_same_memory_holds_more_requests_in_blocks_and_answers_all(report: Report, folder: Path) -> None:
    found = report.results["capacity"]
    memory = kv_bytes(read_config(folder), 2 * 96, torch.float32)
    assert (found["kv_tokens"], found["kv_bytes"]) == (192, memory)
    trace = make_trace(SIZE.capacity, VOCABULARY, 0)
    least = sum(len(r.prompt_ids) + r.new_tokens - 1 for r in trace.requests)
    runs = {name: found[name] for name in ("wide_slots", "tight_slots", *BATCHED[1:])}
    for run in runs.values():
        assert run["memory_kv_bytes"] == memory
        assert (run["num_finished"], run["num_errors"], run["output_tokens"]) == (16, 0, trace.new_tokens)
        assert run["tokens_computed"] == least + run["tokens_recomputed"]
        assert run["decode_stalls"] == run["requests_overtaken"] == 0
        assert 0 < run["mean_concurrent"] <= run["peak_concurrent"] <= run["max_batch_size"]
        assert 0 < run["saturated_kv_utilisation"] < 1
    regions = [found["wide_slots"], found["tight_slots"]]
    assert [run["peak_concurrent"] for run in regions] == [2, 192 // 32]
    assert [run["preemptions"] for run in regions] == [0, 0]
    for name in BATCHED[1:]:
        run = found[name]
        assert 6 < run["peak_concurrent"] <= 192 // 16, "each holds a block at least"
        assert run["peak_concurrent"] < run["max_batch_size"] == 16, "memory is what limits them"
        assert run["preemptions"] > 0 < run["tokens_recomputed"]
        assert run["saturated_kv_utilisation"] > found["tight_slots"]["saturated_kv_utilisation"]
        assert found[f"{name}_over_wide_slots_peak"] == run["peak_concurrent"] / 2
        assert found[f"{name}_over_tight_slots_peak"] == pytest.approx(run["peak_concurrent"] / 6, rel=1e-3)
        speeds = [run["saturated_tokens_per_second"], found["tight_slots"]["saturated_tokens_per_second"]]
        assert found[f"{name}_over_tight_slots_throughput"] == pytest.approx(speeds[0] / speeds[1], rel=1e-3)
    engines = report.engines
    assert (engines["wide_slots_2"]["max_seq_len"], engines["tight_slots_6"]["max_seq_len"]) == (96, 32)
    assert engines["paged_16"]["num_gpu_blocks"] * engines["paged_16"]["block_size"] == 192


def test_whole_steps_are_compared_trial_by_trial_with_memory_for_all(report: Report) -> None:
    found = report.results["whole_step"]
    base = found["continuous"]["tokens_per_second_trials"]
    for name in BATCHED[1:]:
        run = found[name]
        mine = run["tokens_per_second_trials"]
        assert found[f"{name}_over_continuous"] == pytest.approx((mine[0] / base[0] + mine[1] / base[1]) / 2, rel=1e-2)
        assert run["tokens_per_second_median"] == pytest.approx(sum(mine) / 2, rel=1e-3)
        assert (run["num_finished"], run["preemptions"]) == (5, 0)
        # Blocks that are full hold as many as regions of the longest request, but for what 16 does not divide.
        assert run["memory_kv_bytes"] >= found["continuous"]["memory_kv_bytes"]


def test_http_is_compared_trial_by_trial(report: Report) -> None:
    found = report.results["http_overhead"]
    pairs = zip(found["http_tokens_per_second_trials"], found["engine_tokens_per_second_trials"], strict=True)
    shares = [http / engine for http, engine in pairs]
    assert len(shares) == 2
    assert found["http_over_engine"] == pytest.approx(sum(shares) / 2, rel=1e-2)
    assert found["http"]["num_finished"] == found["engine"]["num_finished"] == 4
    assert found["client_processes"] == 1


def test_memory_is_split(report: Report, folder: Path) -> None:
    config = read_config(folder)
    runs = report.results["workloads"]["w1"]
    longest = 26
    assert report.flags["workloads"]["w2"]["prompt_tokens"][1] + 6 == longest
    one = kv_bytes(config, longest, torch.float32)
    assert [runs[name]["memory_kv_bytes"] for name in ("sequential", "padded", "static")] == [one, 3 * one, 3 * one]
    assert runs["static"]["memory_weights_bytes"] == runs["sequential"]["memory_weights_bytes"] > 0
    assert all(runs[name]["memory_other_bytes"] >= 0 for name in ("sequential", "padded", "static", "continuous"))
    assert runs["static"]["peak_activation_bytes"] is None, "a CPU has no peak"


def test_the_report_knows_its_run_and_no_path(report: Report, folder: Path) -> None:
    content = report.to_dict()
    assert content["engines"]["static_3"]["max_seq_len"] == 26
    assert content["engines"]["decode_round_robin_3"]["scheduler_policy"] == "decode_round_robin"
    assert content["engines"]["continuous_4"]["max_batch_size"] == 4
    assert content["engines"][f"{BATCHED[-1]}_4"]["max_batch_size"] == 4
    assert content["flags"]["phase"] == lineup().newest.number
    used = {"w1", "w2", "w3", "backlog", "tail", "together", "streams", "capacity"}
    assert set(content["flags"]["workloads"]) == used
    assert str(folder.parent) not in json.dumps(content)


def test_tables_show_every_run_and_the_ratios(report: Report) -> None:
    console = Console(width=140, record=True, force_terminal=True)
    print_serving(report, console)
    screen, page = console.export_text(), markdown(report)
    for text in (screen, page):
        assert "demo size (no GPU)" in text
        assert text.count("static, padded") == 3 * 2 + 1
        assert "decode_round_robin" in text
        assert "Errors: 0." in text
        assert f"{report.results['closed_loop']['continuous_over_static_saturated']:.2f}×" in text
        assert f"{report.results['capacity']['paged_over_wide_slots_peak']:.2f}×" in text
        assert "192 tokens of KV memory" in text
        assert "Tokens recomputed: " in text
        assert "Whole step: 5 requests" in text
    assert all(len(row) == len(columns) for _, columns, rows in tables(report) for row in rows)
    many = len(BATCHED)
    shown = {"workloads": 3 * (4 + many), "policies": 2 * 3, "tail": 2, "http_overhead": 2, "whole_step": many}
    shown |= dict.fromkeys(("closed_loop", "together", "capacity"), 1 + many)
    assert {name: len(all_runs(found)) for name, found in report.results.items()} == shown


@pytest.mark.parametrize(
    "kept",
    [("workloads", "tail"), ("policies",), ("closed_loop",), ("together",), ("capacity",), ("whole_step",)],
)
def test_the_figure_is_a_picture_of_whatever_was_measured(
    report: Report, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    part = replace(report, results={name: report.results[name] for name in kept})
    save_figure(part, tmp_path / "figure.png")
    pixels = imread(tmp_path / "figure.png")
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01
    assert (pixels[..., 3] == 1).all()
    assert len(markdown(part)) > 200


def test_over_http_the_tokens_are_the_engines(process: ServedProcess, folder: Path) -> None:
    trace = make_trace(SIZE.w2, VOCABULARY, seed=5)
    run = process.serve(trace)
    alone_run = drive(Continuous(EngineConfig(model=str(folder), max_seq_len=64, max_batch_size=3)), trace)
    assert [r.token_ids for r in run.requests] == [r.token_ids for r in alone_run.requests]
    assert len(run.finished) == 5
    for request in run.requests:
        assert request.arrived <= request.scheduled <= request.token_times[0] <= request.ended
        assert request.token_times == sorted(request.token_times)
    assert max(r.new_tokens for r in trace.requests) <= run.num_forwards <= trace.new_tokens
    first, rest = run.requests[:3], run.requests[3:]
    assert all(r.arrived == 0 for r in first)
    assert min(r.arrived for r in rest) >= min(r.ended for r in first)


def test_several_client_processes_share_the_arrivals(process: ServedProcess) -> None:
    trace = make_trace(SIZE.tail, VOCABULARY, seed=2, rate=50.0)
    run = generate_load(process.url, MODEL, trace, clients=2)
    assert [r.arrived for r in run.requests] == [r.arrival for r in trace.requests]
    assert [len(r.token_ids) for r in run.finished] == [r.new_tokens for r in trace.requests]
    assert all(r.token_times[0] > r.arrived for r in run.requests)


def test_a_refusal_and_a_server_that_is_gone_are_errors_with_their_cause(process: ServedProcess) -> None:
    trace = Trace((TraceRequest((5,) * 90, 3), TraceRequest((5,) * 4, 3)), concurrency=2)
    run = process.serve(trace)
    assert run.requests[0].error.startswith("HTTP 422")
    assert run.requests[1].error is None
    assert len(run.finished) == 1
    gone = generate_load("http://127.0.0.1:9", MODEL, Trace((TraceRequest((5,), 3),), concurrency=1))
    assert gone.requests[0].error.startswith("ConnectError")


def test_a_benchmark_that_is_told_to_end_takes_its_server_along(folder: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from benchmarks.serving.served_process import served\n"
        "from shared.lessons import newest_lesson\n"
        "with served(newest_lesson(), Path(sys.argv[1]), ['--device', 'cpu']) as running:\n"
        "    print(running.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise AssertionError('it went on')\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 143, done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    told, options = r"did not become ready: .*--log-format is 'none'", ["--device", "cpu", "--log-format", "none"]
    with pytest.raises(ConfigError, match=told), served(newest_lesson(), folder, options):
        raise AssertionError("it started")


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"experiments": ["speed"]}, ConfigError, "no experiment 'speed'"),
        ({"experiments": []}, ConfigError, "No experiment was named"),
        ({"ways": ["pigeon"]}, ConfigError, "no way 'pigeon'"),
        ({"contenders": ["vllm"]}, ConfigError, "no contender 'vllm'"),
        ({"phase": "04"}, ConfigError, "has no continuous batching"),
        ({"phase": "99"}, ConfigError, "99"),
        ({"phase": "05", "contenders": ["paged"]}, ConfigError, "no contender 'paged'"),
        ({"phase": "05", "experiments": ["capacity"]}, ConfigError, "compares regions with blocks"),
        ({"size": replace(SIZE, wide_slots=(2, 100))}, ConfigError, "2 regions of 100 tokens"),
        ({"size": replace(SIZE, wide_slots=(2, 4096))}, RequestError, "4096"),
        ({"rate": 0.0}, ConfigError, "rate is 0.0"),
        ({"max_seconds": -1.0}, ConfigError, "max_seconds is -1.0"),
        ({"seed": -1}, ConfigError, "seed is -1"),
        ({"threads": 0}, ConfigError, "threads is 0"),
        ({"clients": 0}, ConfigError, "clients is 0"),
        ({"dtype": "int3"}, ConfigError, "int3"),
        ({"device": "cuda:77"}, ConfigError, "cuda:77"),
        ({"size": replace(SIZE, trials=0)}, ConfigError, "trials is 0"),
        ({"size": replace(SIZE, w2=replace(SIZE.w2, prompt_tokens=(4, 2048)))}, RequestError, "2048"),
    ],
)
def test_bad_settings_are_refused_before_any_work(
    folder: Path, settings: dict[str, Any], error: Any, told: str
) -> None:
    def progress(*_: object) -> None:
        raise AssertionError("work began")

    with pytest.raises(error) as caught:
        measure_serving(str(folder), **{"size": SIZE, **settings}, progress=progress)
    assert told in str(caught.value)


def test_what_cannot_be_had_here_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--large"):
        default_size("cpu", is_large=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fastapi" else object())
    with pytest.raises(ConfigError, match=r"needs fastapi.*--way engine"):
        measure_serving(str(folder), size=SIZE, experiments=["workloads"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1000))
    with pytest.raises(CapacityError, match=r"2 engines.*--experiment"):
        measure_serving(str(folder), size=SIZE, experiments=["tail"])


def test_a_rate_and_a_bound_of_seconds_reach_the_runs(folder: Path) -> None:
    options: dict[str, Any] = {"experiments": ["workloads"], "ways": ["engine"], "contenders": ["static"]}
    found = measure_serving(str(folder), size=SIZE, threads=1, rate=100.0, **options)
    arrivals = [r.arrival for r in make_trace(SIZE.w2, VOCABULARY, 0, rate=100.0).requests]
    assert found.results["workloads"]["w2"]["static"]["seconds"] > arrivals[-1]
    cut = measure_serving(str(folder), size=SIZE, threads=1, max_seconds=1e-9, **options)
    run = cut.results["workloads"]["w2"]["static"]
    assert (run["is_cut"], run["steps"], run["num_errors"]) == (True, 1, 0)
    assert "broken off" in markdown(cut)


def test_an_interrupted_run_reports_what_was_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"size": SIZE, "threads": 1, "experiments": ["closed-loop", "together"]}

    def interrupt(bench: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as later:
        later.setitem(RUN, "together", interrupt)
        found = measure_serving(str(folder), **options)
        assert list(found.results) == ["closed_loop"]
        assert found.flags["experiments"] == ["closed-loop"]
        assert "together" not in markdown(found)
        later.setitem(RUN, "closed-loop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            measure_serving(str(folder), **options)


def test_the_matrix_has_a_cell_for_each_configuration_and_workload(folder: Path) -> None:
    found = run_matrix(str(folder), phases=["02", "05", "06"], size=SIZE, threads=1)
    policies = ["05 scheduler_policy=prefill_first", "05 scheduler_policy=decode_round_robin"]
    rows = ["02", "05", *policies, "06", "06 kv_cache_backend=contiguous"]
    assert list(found.results) == list(found.engines) == rows == found.flags["configurations"]
    for name, workload in SIZE.workloads.items():
        trace = make_trace(workload, VOCABULARY, 0)
        cells = {row: found.results[row][name] for row in rows}
        assert {cell["output_tokens"] for cell in cells.values()} == {trace.new_tokens}
        prompts = [len(r.prompt_ids) for r in trace.requests]
        news = [r.new_tokens for r in trace.requests]
        anew = sum(sum(range(p, p + n)) for p, n in zip(prompts, news, strict=True))
        assert cells["02"]["tokens_computed"] == anew
        batched = {cells[row]["tokens_computed"] for row in rows[1:]}
        assert batched == {sum(prompts) + sum(news) - len(news)}
        speeds = {row: cell["output_tokens_per_second"] for row, cell in cells.items()}
        assert cells["05"]["gain_over_first"] == pytest.approx(speeds["05"] / speeds["02"], rel=1e-3)
        assert cells[rows[3]]["gain_over_previous"] == pytest.approx(speeds[rows[3]] / speeds["02"], rel=1e-3)
        assert cells[rows[5]]["gain_over_previous"] == pytest.approx(speeds[rows[5]] / speeds["05"], rel=1e-3)
        assert cells["02"]["gain_over_previous"] is None
    page = matrix_markdown(found)
    assert page.count("| 05 scheduler_policy=prefill_first |") == 3
    assert page.count("| 06 Paged memory |") == page.count("| 06 kv_cache_backend=contiguous |") == 3
    assert "W3 shared prefix: 4 requests" in page


def test_the_serving_command_prints_json_last_and_writes_the_files(folder: Path, tmp_path: Path) -> None:
    arguments = ["--model", folder, "--experiment", "tail", "--tail-requests", 5, "--threads", 1, "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "serving", *map(str, arguments), "--out", str(tmp_path / "reports")])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert list(line["results"]) == ["tail"]
    assert line["results"]["tail"]["static"]["num_requests"] == 5
    stem = f"serving-tiny-llama-{line['machine']}"
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {stem + e for e in (".json", ".md", ".png")}
    assert read_value(tmp_path / "reports" / f"{stem}.json", "results.tail.continuous.num_finished") == 5
    assert line["flags"]["workloads"]["tail"]["prompt_tokens"] == list(DEMO.tail.prompt_tokens)


def test_the_matrix_command_prints_json_last_and_writes_the_files(folder: Path, tmp_path: Path) -> None:
    arguments = ["--model", folder, "--phase", "4", "--threads", 1, "--device", "cpu", "--out", tmp_path]
    result = CliRunner().invoke(app, ["bench", "matrix", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert list(line["results"]) == ["04"]
    assert line["results"]["04"]["w2"]["gain_over_first"] == 1.0
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("serving", ["--model", "no-such-model"]),
        ("serving", ["--experiment", "speed"]),
        ("serving", ["--tail-requests", "0"]),
        ("serving", ["--phase", "03.1"]),
        ("matrix", ["--phase", "01a"]),
        ("matrix", ["--max-seconds", "0"]),
    ],
)
def test_the_commands_refuse_in_one_paragraph(folder: Path, command: str, arguments: list[str]) -> None:
    given = ["bench", command, "--model", str(folder), "--device", "cpu", *arguments]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert arguments[1] in result.output


@pytest.mark.gpu
def test_on_a_gpu_memory_has_a_peak_and_padding_gives_the_same_counts(folder: Path) -> None:
    found = measure_serving(str(folder), size=SIZE, device="cuda", experiments=["workloads"], ways=["engine"])
    for run in found.results["workloads"]["w2"].values():
        assert run["peak_activation_bytes"] > 0
        assert run["num_finished"] == 5
