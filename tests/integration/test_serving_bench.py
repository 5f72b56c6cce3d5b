"""The serving benchmark and the matrix on tiny models: real engines, a real server, counts that hold anywhere."""

import asyncio
import contextlib
import json
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import psutil
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.bench_serving import measure_serving
from benchmarks.report import Report, read_value
from benchmarks.serving.contenders import lineup
from benchmarks.serving.engine_load import drive
from benchmarks.serving.experiments import EXPERIMENTS, Runner, value_at
from benchmarks.serving.http_load import MODEL, ServedProcess, generate_load, served
from benchmarks.serving.view import all_runs, view
from benchmarks.setup import Setup
from benchmarks.view import markdown
from benchmarks.workloads.serving import ServingSize, Trace, TraceRequest, Workload, decoding, make_trace
from phases.phase_05.engine import Engine as Continuous
from shared.cache.view.contiguous import kv_bytes
from shared.cli import app
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson, newest_lesson
from shared.loading.config_json import read_config

pytestmark = pytest.mark.slow
VOCABULARY = 300
DECODE = Workload("decode", "2 decode", 2, 2, (4, 4), (6, 6))
BATCHED = [name for name in ("continuous", "paged", "newest") if name in lineup()]
SIZE = ServingSize(
    max_batch_size=3,
    w1=Workload("w1", "W1 single", 1, 1, (6, 6), (3, 3)),
    w2=Workload("w2", "W2 mixed", 5, 3, (4, 20), (2, 6)),
    w3=Workload("w3", "W3 shared prefix", 4, 3, (10, 12), (2, 3), shared_prefix_tokens=8),
    backlog=Workload("backlog", "Closed loop", 8, 6, (4, 9), (2, 6)),
    tail=Workload("tail", "Tail", 6, 6, (4, 9), (2, 6)),
    together=Workload("together", "3 at once", 3, 3, (4, 9), (3, 3)),
    streams=Workload("streams", "3 streams", 3, 3, (4, 9), (3, 3)),
    capacity=Workload("capacity", "Capacity", 16, 16, (4, 20), (4, 12)),
    wide_slots=(2, 96),
    decode=DECODE,
    long_prompts=Workload("long_prompts", "Long", 2, 3, (22, 22), (2, 2), beside=DECODE),
    chunk=4,
    chunk_sizes=(4, 22),
    w4=Workload("w4", "W4", 4, 2, (40, 44), (2, 3), shared_prefix_tokens=32),
    one_prefix=Workload("one_prefix", "One", 2, 1, (40, 40), (2, 2), shared_prefix_tokens=32),
    conversation=Workload("conversation", "Talk", 1, 1, (20, 20), (4, 4), turns=3, turn_tokens=(12, 12)),
    agents=Workload("agents", "Agents", 3, 3, (20, 20), (2, 2), 16, turns=2, turn_tokens=(4, 6)),
    **{f"decode_{name}": decoding(f"decode_{name}", n, 4) for n, name in enumerate(("one", "few", "tens", "most"), 1)},
    sampled=Workload("sampled", "4 sampled", 4, 4, (10, 20), (6, 12), temperature=0.6),
    trials=2,
)
OPTIONS = ["--device", "cpu", "--max-seq-len", "26", "--dtype", "float32", "--max-batch-size", "3"]


@pytest.fixture(scope="module", autouse=True)
def no_collection() -> Iterator[None]:
    """Engines are tiny; a full collection takes longer than a trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", lambda: 0)
        yield


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[ServedProcess]:
    with served(newest_lesson(), folder, OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def report(folder: Path, process: ServedProcess) -> Report:
    """Every experiment, with the server of this module."""
    start = Mock(return_value=contextlib.nullcontext(process))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.bench_serving.served", start)
        report = measure_serving(Setup(str(folder), threads=1), size=SIZE)
    start.assert_called_once_with(newest_lesson(), folder, OPTIONS)
    return report


def test_every_contender_serves_the_same_trace_to_its_end(report: Report, folder: Path) -> None:
    assert list(report.results) == [experiment.key for experiment in EXPERIMENTS]
    for name in ("w1", "w2", "w3"):
        trace, runs = make_trace(getattr(SIZE, name), VOCABULARY, 0), report.results["workloads"][name]
        assert list(all_runs(runs)) == ["sequential", "transformers", "static", *BATCHED, "http"]
        for contender, run in all_runs(runs).items():
            assert run["num_finished"] == run["num_requests"] == len(trace.requests), (name, contender)
            assert (run["num_errors"], run["output_tokens"], run["is_cut"]) == (0, trace.new_tokens, False)
            assert run["request_latency_ms"]["p50"] >= run["time_to_first_token_ms"]["p50"] > 0
        least = sum(len(r.prompt_ids) for r in trace.requests) + trace.new_tokens - len(trace.requests)
        assert {runs[c]["tokens_computed"] for c in ("sequential", "static", *BATCHED)} == {least}
        assert {runs[c]["preemptions"] for c in BATCHED} == {0}, "there is memory for all"
        sequential, padded, static = (runs[c] for c in ("sequential", "transformers", "static"))
        assert (sequential["forward_passes"], sequential["slot_utilisation"]) == (trace.new_tokens, 1)
        assert padded["forward_passes"] == static["forward_passes"] == static["steps"]
        assert runs["http"]["steps"] is None
        speeds = [run["output_tokens_per_second"] for run in (static, padded, sequential)]
        ratios = (runs["static_over_transformers"], static["gain"])
        assert ratios == pytest.approx((speeds[0] / speeds[1], speeds[0] / speeds[2]), rel=1e-3)
    w2 = report.results["workloads"]["w2"]
    assert w2["continuous"]["forward_passes"] < w2["sequential"]["forward_passes"]
    assert w2["transformers"]["tokens_computed"] > w2["static"]["tokens_computed"], "padding is computed"
    answers = [r.new_tokens for r in make_trace(SIZE.w2, VOCABULARY, 0).requests]
    assert w2["static"]["steps"] == max(answers[:3]) + max(answers[3:])
    assert w2["static"]["slot_utilisation"] == pytest.approx(sum(answers) / (3 * w2["static"]["steps"]), rel=1e-3)
    one = kv_bytes(read_config(folder), 26, torch.float32)
    assert [w2[name]["memory_kv_bytes"] for name in ("sequential", "static")] == [one, 3 * one]


def test_policies_starve_no_request_and_ratios_are_medians_over_the_trials(report: Report) -> None:
    for runs in report.results["policies"].values():
        assert list(runs) == ["fcfs", "prefill_first", "decode_round_robin"]
        assert {run["decode_stalls"] + run["requests_overtaken"] for run in runs.values()} == {0}
        assert len({run["output_tokens"] for run in runs.values()}) == 1
    compared = [("closed_loop", "static", "_saturated"), ("whole_step", "continuous", ""), ("pairs.w2", "whole", "")]
    for experiment, under, suffix in [*compared, ("http_overhead", "engine", "")]:
        found = value_at(report.results, experiment)
        for name in set(all_runs(found)) - {under, "unchunked", "uncached"}:
            trials = [found[each]["tokens_per_second_trials"] for each in (name, under)]
            ratios = [mine / other for mine, other in zip(*trials, strict=True)]
            assert len(ratios) == SIZE.trials
            key = f"{name}_over_{under}{suffix}"
            assert found[key] == pytest.approx(statistics.median(ratios), rel=1e-2)
            assert found[f"{key}_range"] == pytest.approx([min(ratios), max(ratios)], rel=1e-2)
    tail = report.results["tail"]
    over, below = (tail[name]["queue_wait_ms"]["p99"] for name in ("continuous", "static"))
    assert tail["continuous_over_static_p99_queue_wait"] == pytest.approx(over / below, rel=1e-2)
    assert (tail["load"], tail["rate_requests_per_second"] > 0) == (0.8, True)


def test_long_prompts_come_while_others_decode_and_the_curve_has_a_point_for_each_size(report: Report) -> None:
    found, curve = report.results["long_prompts"], all_runs(report.results["chunk_size"])
    assert list(all_runs(found)) == ["unchunked", "whole", "alone", "one_chunk"]
    assert [run["num_finished"] for run in all_runs(found).values()] == [2, 2, 2, 2]
    assert (found["alone"]["num_requests"], found["alone"]["output_tokens"]) == (2, 12)
    assert (found["load"], found["one_chunk"]["settings"]["prefill_chunk_size"]) == (0.7, 4)
    # A prompt of 22 tokens takes one chunk, or six of 4, whatever decodes beside it.
    forwards = [run["forward_passes"] for run in curve.values()]
    assert list(curve) == ["chunk_4", "chunk_22"]
    assert forwards[0] - forwards[1] >= 4 * (6 - 1)
    assert view(report).panels[-1].x == [4, 22]
    served = [(run["num_finished"], run["output_tokens"]) for run in all_runs(report.results["decode"]).values()]
    assert served == [(n, 4 * n) for n in (1, 2, 3, 4)], "each size of batch, with room for the largest"
    sampled = report.results["sampled"]["newest"]
    assert (sampled["num_finished"], sampled["settings"]) == (4, {"num_gpu_blocks": SIZE.sampled_blocks})


def test_a_prefix_is_computed_once_and_a_turn_computes_what_it_adds(report: Report) -> None:
    found = report.results["prefixes"]
    for name in ("one_prefix", "conversation", "agents"):
        without, cached = (found[name][contender] for contender in ("uncached", "newest"))
        assert without["output_tokens"] == cached["output_tokens"]
        assert without["tokens_computed"] > cached["tokens_computed"]
    talk = found["conversation"]
    assert talk["uncached"]["prompt_tokens_by_turn"] == [20, 20 + 16, 20 + 2 * 16]
    # Of 23 tokens with keys and values whole blocks of 16 are shared; later also what the first turn left.
    assert talk["newest"]["prompt_tokens_by_turn"] == [20, 36 - 16, 52 - 32]
    assert found["w4"]["newest_over_uncached_first_token"] > 0 < found["agents"]["newest_over_uncached_requests"]


def test_blocks_hold_more_in_the_same_bytes_and_the_view_shows_every_run(report: Report, folder: Path) -> None:
    found = report.results["capacity"]
    bytes_of_all = kv_bytes(read_config(folder), 2 * 96, torch.float32)
    assert {run["memory_kv_bytes"] for run in all_runs(found).values()} == {bytes_of_all}
    assert [found[name]["peak_concurrent"] for name in ("wide_slots", "tight_slots")] == [2, 6]
    for name in BATCHED[1:]:
        assert found[f"{name}_over_wide_slots_peak"] == found[name]["peak_concurrent"] / 2 > 3
        extra = found[name]["tokens_computed"] - found["wide_slots"]["tokens_computed"]
        assert extra == found[name]["tokens_recomputed"]
    assert report.engines["decode_round_robin_3"]["scheduler_policy"] == "decode_round_robin"
    assert str(folder.parent) not in json.dumps(report.to_dict())
    page = markdown(view(report))
    assert page.count("\n| transformers, padded batches |") == 3 * 2
    assert f"{report.results['closed_loop']['continuous_over_static_saturated']:.2f}×" in page


def test_over_http_the_tokens_are_the_engines_and_an_error_has_its_cause(process: ServedProcess, folder: Path) -> None:
    trace = make_trace(SIZE.w2, VOCABULARY, seed=5)
    run = process.serve(trace)
    alone = drive(Continuous(EngineConfig(model=str(folder), max_seq_len=64, max_batch_size=3)), trace)
    assert [r.token_ids for r in run.requests] == [r.token_ids for r in alone.requests]
    for request in run.requests:
        assert request.arrived <= request.scheduled <= request.token_times[0] <= request.ended
    assert min(r.arrived for r in run.requests[3:]) >= min(r.ended for r in run.requests[:3])
    poisson = make_trace(SIZE.tail, VOCABULARY, seed=2, rate=50.0)
    by_the_clock = asyncio.run(generate_load(process.url, MODEL, poisson))
    assert [r.arrived for r in by_the_clock.requests] == [r.arrival for r in poisson.requests]
    assert [len(r.token_ids) for r in by_the_clock.finished] == [r.new_tokens for r in poisson.requests]
    run = process.serve(Trace((TraceRequest((5,) * 90, 3), TraceRequest((5,) * 4, 3)), concurrency=2))
    assert (run.requests[0].error[:8], run.requests[1].error) == ("HTTP 422", None)
    gone = asyncio.run(generate_load("http://127.0.0.1:9", MODEL, poisson))
    assert gone.requests[0].error.startswith("ConnectionRefusedError")


def test_a_server_ends_with_its_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = json.dumps({"event": "ready", "url": ""})
    body = f"import sys, time; print({ready!r}, file=sys.stderr, flush=True); time.sleep(60)"
    (tmp_path / "stub.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stub, absent = (cast(Lesson, SimpleNamespace(module_name=name)) for name in ("stub", "no_such_module"))
    pids = []
    with contextlib.suppress(SystemExit), served(stub, tmp_path, []) as running:
        pids.append(running.pid)
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")
    assert not psutil.pid_exists(pids[0])
    with pytest.raises(ConfigError, match=r"did not become ready: .*no_such_module"), served(absent, tmp_path, []):
        raise AssertionError("it started")


def test_an_interrupted_run_reports_what_was_completed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", Mock(side_effect=[{}, KeyboardInterrupt, KeyboardInterrupt]))
    found = measure_serving(Setup(str(folder)), size=SIZE, experiments=["policies", "tail"])
    assert list(found.results) == found.flags["experiments"] == ["policies"]
    assert "Poisson" not in markdown(view(found))
    with pytest.raises(KeyboardInterrupt):
        measure_serving(Setup(str(folder)), size=SIZE, experiments=["policies", "tail"])


def test_the_matrix_measures_each_configuration_on_each_workload(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.run_matrix.default_size", lambda device: SIZE)
    arguments = ["--phase", "2", "--phase", "05", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "matrix", "--model", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    rows = ["02", "05", "05 scheduler_policy=prefill_first", "05 scheduler_policy=decode_round_robin"]
    assert list(line["results"]) == rows == line["flags"]["configurations"]
    for name in ("w1", "w2", "w3"):
        trace, cells = make_trace(getattr(SIZE, name), VOCABULARY, 0), [line["results"][row][name] for row in rows]
        sizes = [(len(r.prompt_ids), r.new_tokens) for r in trace.requests]
        assert {cell["output_tokens"] for cell in cells} == {trace.new_tokens}
        assert cells[0]["tokens_computed"] == sum(sum(range(p, p + n)) for p, n in sizes)
        assert {cell["tokens_computed"] for cell in cells[1:]} == {sum(p + n - 1 for p, n in sizes)}
        speeds = [cell["output_tokens_per_second"] for cell in cells]
        assert cells[3]["gain_over_previous"] == pytest.approx(speeds[3] / speeds[0], rel=1e-3)
    assert next(tmp_path.glob("*.md")).read_text().count("| 05 scheduler_policy=prefill_first |") == 3


def test_the_command_writes_a_report_and_its_options_reach_the_runs(folder: Path, tmp_path: Path) -> None:
    arguments = ["-e", "tail", "-e", "workloads", "-c", "static", "--rate", "0.5", "--max-seconds", "1e-9"]
    arguments += ["--tail-requests", "5", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "serving", "--model", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    assert list(line["results"]) == ["workloads", "tail"]
    run = line["results"]["workloads"]["w2"]["static"]
    told = (run["is_cut"], run["steps"], run["num_errors"], run["output_tokens"])
    assert told == (True, 1, 0, 1), "of four that would be open, one had come"
    assert "broken off" in result.stdout
    written = tmp_path / f"serving-tiny-llama-{line['machine']}.json"
    assert read_value(written, "results.tail.static.num_requests") == 5
