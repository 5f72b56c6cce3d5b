"""Ladder, contexts, generation and profile on tiny models: real runs, and counts that hold on any machine."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from typer.testing import CliRunner

from benchmarks import bench_generation, contexts, ladder, profile_generation, prompts, rungs, segments, speculation
from benchmarks.bench_generation import GenerationSize, limit_bytes, measure_generation
from benchmarks.contenders import load_engine, load_transformers
from benchmarks.hardware import Ceilings
from benchmarks.report import Report, read_value, write_report
from benchmarks.roofline import DecodeWork
from benchmarks.setup import Setup
from benchmarks.step_trace import StepTrace, TraceWindow
from benchmarks.timing import Run, Steps, timed
from benchmarks.view import View
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.errors import ConfigError
from shared.lessons import find_lesson, newest_lesson
from shared.loading import checkpoint
from shared.loading.config_json import parse_config, read_config

pytestmark = pytest.mark.slow
SIZE = GenerationSize(prompt_tokens=7, new_tokens=6, trials=2)
CEILINGS = Ceilings(2e9, 1e9, 1e10, None, None, "float32")
NEWEST = newest_lesson().number
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["gemma3_text"]


@pytest.fixture(scope="module")
def rows(folder: Path) -> Report:
    return ladder.measure_ladder(str(folder), pairs=1)


@pytest.fixture(scope="module")
def generated(folder: Path) -> Report:
    return measure_generation(str(folder), phases=["02", "03"], size=SIZE, ceilings=CEILINGS, threads=1)


def infer(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu", "--threads", "1"])


def test_a_row_compares_a_phase_with_the_one_before_it(rows: Report, folder: Path) -> None:
    """All but 11.1, for whose drafts this model has no adapter, and 4 bits, whose groups do not divide this model's
    rows."""
    names = ["03", "03.1", "04", "05", "06", "06.1", "07", "08", "09", "09.1", "09.2", "11_tokens", "11", "12", "12.1"]
    assert list(rows.results) == list(rows.engines) == names
    for name, row in rows.results.items():
        assert row["phase_before"] == (find_lesson(name.partition("_")[0]).previous)
        assert len(row["trials"]) == 1
        assert row["is_timed"] == ("gains" in row)
        if row["is_timed"]:
            assert min(row["before"], row["after"], *row["gains"]) > 0
    assert rows.engines["03"]["model"] == folder.name
    assert str(folder.parent) not in json.dumps(rows.to_dict())


def test_counts_are_exact(rows: Report, folder: Path) -> None:
    num_layers = read_config(folder).num_layers
    found = {name: (row["before"], row["after"]) for name, row in rows.results.items() if not row["is_timed"]}
    assert found["03.1"] == (7 * num_layers + 1, 4 * num_layers + 1), "queries, keys and values; gate and up"
    assert found["06"][0] == rungs.REGIONS < found["06"][1]
    assert found["06.1"] == (4096, 128)
    assert found["09"] == (0, 16)
    assert found["09.2"][0] == (128 + rungs.LONG_ANSWER) // 16 > found["09.2"][1]
    assert found["11_tokens"][0] == 1 <= found["11_tokens"][1]
    assert 0.5 <= found["12.1"][1] / found["12.1"][0] < 0.6, "two processes; each has the norms"
    assert found["12"][0] == 0 < found["12"][1], "of 40 tokens, which without a grammar are random"


def test_a_row_that_was_disturbed_is_measured_once_more_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pairs that agree beside idle processors, one set is made; both sides have the threads that others leave."""
    speeds = iter([1.0, 2.0, 2.0, 1.0, 1.0, 3.0, *[1.0, 1.0, 1.0, 3.0] * 2])  # after, before, before, after
    rung = rungs.Rung("03", "a row", rungs.side("02"), rungs.side("03"), lambda engine, pair: next(speeds))
    left = iter([4.0, 4.0, 4.0, 2.0, 2.0, 1.6, *[0.3, 0.9] * 2])  # processors, before and beside each measurement
    monkeypatch.setattr(ladder.Others, "left", lambda self: next(left))
    fixed: list[int] = []
    threads = ladder.Threads(1, 4, fixed.append)
    steady = ladder.measure_rung(rung, (None, None), 1, Steps(None, 1), threads)
    assert (steady["gain"], steady["is_steady"], len(steady["trials"])) == (0.5, True, 1)
    busy = ladder.measure_rung(rung, (None, None), 1, Steps(None, 1), threads)
    assert (busy["gain"], busy["is_steady"]) == (3.0, True), "what other programs disturbed is not kept"
    wild = ladder.measure_rung(rung, (None, None), 2, Steps(None, 4), threads)
    assert (wild["is_steady"], len(wild["trials"])) == (False, 2)
    assert [row["threads"] for row in (steady, busy, wild)] == [4, 2, 1]
    assert [row["shared"] for row in (steady, busy, wild)] == [0, pytest.approx(0.2), pytest.approx(0.1)]
    assert fixed == [4, 4, 2, 1, 1]


def test_what_other_programs_use_is_not_read_off_within_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick of the system's counter within a millisecond looks like ten busy processors, and says nothing."""
    now, busy, fixed = [0.0], [0.0], list[int]()
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 0.0)
    monkeypatch.setattr(ladder, "time", clock)
    monkeypatch.setattr(ladder, "_busy_seconds", lambda: busy[0])
    monkeypatch.setattr(ladder.psutil, "cpu_count", lambda: 4)
    threads = ladder.Threads(1, 4, fixed.append)
    for seconds, used, number in ((2.0, 2.0, 3), (0.001, 0.01, 3), (2.0, 0.0, 4), (0.001, 0.01, 4)):
        now[0], busy[0] = now[0] + seconds, busy[0] + used
        assert threads.choose() == number
    now[0], busy[0] = now[0] + 0.001, busy[0] + 0.01
    assert threads.shared() == 0.0
    now[0], busy[0] = now[0] + 1.999, busy[0] + 3.99
    assert threads.shared() == pytest.approx(0.5)
    assert fixed == [3, 3, 4, 4]


@pytest.mark.parametrize(("last", "is_repeated"), [(20.0, False), (100.0, True)])
def test_a_repetition_that_the_time_cuts_short_hides_no_unsteady_row(
    monkeypatch: pytest.MonkeyPatch, last: float, is_repeated: bool
) -> None:
    """Three pairs that differ, then three that agree; each takes 4 s of a clock that only they move."""
    now, gains = [0.0], iter([1.0, 3.0, 1.0, 2.0, 2.0, 2.0])

    def measure(engine: Any, pair: int) -> float:
        now[0] += 2.0
        return next(gains) if engine == "after" else 1.0

    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(ladder, "Others", lambda: SimpleNamespace(left=lambda: 4.0))
    rung = rungs.Rung("03", "a row", rungs.side("02"), rungs.side("03"), measure)
    threads = ladder.Threads(1, 4, lambda number: None)
    row = ladder.measure_rung(rung, ("before", "after"), 3, Steps(None, 6), threads, last)
    assert len(row["trials"]) == 3
    assert row["is_steady"] == is_repeated, "two pairs that agree say less than three that do not"


def test_a_limited_time_leaves_out_pairs_and_rows_and_says_so(folder: Path) -> None:
    totals = set()
    report = ladder.measure_ladder(
        str(folder), phases=["04", "05", "06"], seconds=0.0, progress=lambda text, done, total: totals.add(total)
    )
    assert [len(row["trials"]) for row in report.results.values()] == [1]
    first, *others = [rung for rung in rungs.RUNGS if rung.phase in ("04", "05", "06")]
    assert report.flags["late"] == [f"{rung.phase} {rung.what}" for rung in others]
    told = "\n".join(ladder.view(report).warnings)
    assert f"Phase {first.phase}: the time was over before all 3 pairs" in told
    assert all(f"The time was over before {row} began" in told for row in report.flags["late"])
    assert len(totals) == 1, "the total of the progress stays as it is"


def test_the_table_marks_rows_that_were_disturbed(rows: Report) -> None:
    def table(**more: Any) -> View:
        steady = {"is_steady": True, "threads": 2, "shared": 0.0, "gains": [2.0, 2.1]}
        results = {name: row | (steady if row["is_timed"] else {}) for name, row in rows.results.items()}
        results["03"] |= more
        return ladder.view(replace(rows, results=results, flags=rows.flags | {"threads": 2}))

    quiet = table()
    assert not quiet.tables[0].style(quiet.tables[0].rows[0])
    assert not quiet.warnings
    assert not any("threads" in note for note in quiet.notes)
    marked = table(is_steady=False, gains=[1.0, 3.0], threads=1)
    cells = [column.cell(marked.tables[0].rows[0]) for column in marked.tables[0].columns]
    assert cells[:2] == ["03 The KV cache", "one request, tokens/s"]
    assert cells[-1] == "1.00 to 3.00 !"
    assert marked.tables[0].style(marked.tables[0].rows[0])
    assert marked.warnings == ["! Phase 03: the pairs differ by more than 1.5×."]
    assert marked.notes[0].startswith("Phase 03: timed with 1 of 2 threads, because other programs ")
    (warning,) = table(is_steady=False, shared=0.3).warnings
    assert warning.startswith("! Phase 03: other programs used the processors")


def test_a_phase_without_a_row_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no row for phase 02"):
        ladder.measure_ladder(str(folder), phases=["02"])


def test_an_answer_is_readable_if_it_is_an_object_of_both_keys() -> None:
    ada = '{"name": "Ada", "born": 1815}'
    born = [ada.replace("1815", other) for other in ('"1815"', "true")]
    assert rungs.is_person(ada)
    assert rungs.is_person('{"born": 1815, "name": ""}')
    for wrong in ('{"name": "Ada"}', *born, f"```json\n{ada}\n```", f"[{ada}]", ""):
        assert not rungs.is_person(wrong), wrong


def test_without_a_cache_a_token_computes_its_whole_context(folder: Path) -> None:
    found = contexts.measure_contexts(
        str(folder), phases=["2", "3"], prompt_tokens=5, new_tokens=4, trials=1, context_lengths=[40, 3]
    )
    assert [each["tokens_computed"] for each in found.results.values()] == [sum(5 + i for i in range(4)), 5 + 3]
    for result in found.results.values():
        assert result["equal_output"]
        assert list(result["ms_per_token"]) == ["3", "40"]
        assert min(*result["ms_per_token"].values(), result["time_to_first_token_ms"], result["speedup"]) > 0


def test_contenders_answer_the_same_at_a_share_of_the_bytes_a_token_must_read(generated: Report, folder: Path) -> None:
    results, names = generated.results, generated.flags["contenders"]
    assert names == ["02", "03", "transformers_eager"]
    work = DecodeWork(read_config(folder), torch.float32)
    # Five decode steps see 8 to 12 tokens, fewer than the window of 16; the tied head is the embedding.
    needed = work.resident_bytes + 10 * work.kv_bytes_per_token
    assert limit_bytes(work, 7, 6) == needed
    assert limit_bytes(work, 7, 6, packed=0.5) == needed - work.resident_bytes / 2
    assert results["limit"]["tokens_per_second"] == pytest.approx(1e9 / needed, rel=1e-3)
    for name in names:
        found = results[name]
        assert found["new_tokens"] == found["equal_tokens"] == found["compared_tokens"] == SIZE.new_tokens, name
        assert found["tokens_computed"] == (sum(range(7, 7 + 6)) if name == "02" else 7 + 5)
        share = found["decode_tokens_per_second"] / results["limit"]["tokens_per_second"]
        assert found["share_of_bandwidth"] == pytest.approx(share, rel=2e-3)
        assert found["kernel_us_per_token"] is found["kernels_per_token"] is found["host_launches_per_token"] is None
        assert found["own_launches_per_token"] == 0
    assert set(results["ratios"]) == {"03_over_02", "02_over_transformers_eager", "03_over_transformers_eager"}
    trials = [results[name]["decode_tokens_per_second_trials"] for name in ("03", "02")]
    ratio = sum(a / b for a, b in zip(*trials, strict=True)) / 2
    assert results["ratios"]["03_over_02"] == pytest.approx(ratio, rel=2e-3)
    assert generated.engines["transformers_eager"]["generate"] == {"do_sample": False, "attention": "sdpa"}


def test_a_window_traces_its_steps_and_no_others(folder: Path) -> None:
    """One matrix product a projection: their count says how many steps were seen, of ours and of transformers."""
    setup = Setup(str(folder))
    ours = load_engine(find_lesson("03"), setup.config())["03"]
    theirs = load_transformers(["transformers_eager"], setup)["transformers_eager"]
    products = 7 * setup.shape.num_layers + 1
    for contender in (ours, theirs):
        trace = TraceWindow(first=2, steps=3, device=CPU).trace(contender.answer, [7] * 5, 9)
        assert {name: calls for name, calls, _ in trace.rows()}["aten::linear"] == 3 * products
    # Past any end of sequence, although the folder names end ids.
    assert len(timed(theirs.answer, [7, 300, 42], 40).token_ids) == 40
    with pytest.raises(ValueError, match="ended after 2 tokens"):
        TraceWindow(first=1, steps=3, device=CPU).trace(ours.answer, [7] * 5, 2)


def gpu_trace() -> StepTrace:
    """Two steps: three kernels and copies of a graph, launched by the host four times, which then waits."""
    calls = [("gemv", 5.0), ("gemv", 7.0), ("norm", 20.0), ("Memcpy HtoD (Pinned -> Device)", 1.0)]
    calls += [("Memset (Device)", 1.0), ("decode", 999.0)]
    host = [(f"cu{name}", 2.0) for name in ("daLaunchKernel", "LaunchKernelEx", "daGraphLaunch", "daLaunchKernelExC")]
    host += [("cudaStreamSynchronize", 500.0), ("cudaDeviceSynchronize", 500.0), ("aten::mm", 4.0)]
    common: dict[str, Any] = {"thread": 0, "use_device": "cuda", "stack": []}
    averages = EventList([], use_device="cuda")
    for i, (name, us) in enumerate(calls + host):
        common["device_type"] = DeviceType.CUDA if i < len(calls) else DeviceType.CPU
        mark = {"is_user_annotation": name == "decode"}
        averages.append(FunctionEvent(id=i, name=name, start_us=1000 * i, end_us=1000 * i + us, **common, **mark))
    averages._build_tree()
    return StepTrace(averages.key_averages(), steps=2, own_launches=2)


def test_on_a_gpu_kernels_copies_and_launches_are_told_apart() -> None:
    trace = gpu_trace()
    figures = {"kernel_us": 16, "kernels": 1.5, "copies": 1, "host_launches": 2, "own_launches": 1}
    assert trace.figures() == {f"{name}_per_token": figure for name, figure in figures.items()}
    plain = Run([1] * 8, [0.5 + 0.0001 * i for i in range(8)], 10)
    found = profile_generation.results(find_lesson("03"), plain, trace)
    assert [found[f"{name}us_per_token"] for name in ("", "kernel_", "idle_")] == [100, 16, 84]
    assert found["rows"][1] == {"name": "gemv", "count_per_token": 1, "us_per_token": 6, "share": pytest.approx(0.06)}


@pytest.mark.parametrize(
    ("command", "name", "cited"),
    [
        ("ladder --phase 6.1", "ladder", {"results.06.1.after": 128}),
        (
            "bench contexts --phase 2 --trials 1 --new-tokens 3 --contexts 2,6 --prompt-tokens 4",
            "contexts",
            {"results.02.tokens_computed": 15},
        ),
        (
            "bench generation --phase 3 --trials 1 --new-tokens 3 --no-peers --pack-weights --prompt-tokens 4",
            "generation-packed",
            {"results.03.tokens_computed": 4 + 2, "results.ratios": {}, "engines.03.pack_weights": True},
        ),
        (
            "bench profile --phase 03 --steps 2 --top 3 --trace trace.json.gz --prompt-tokens 4",
            "profile-03",
            {"results.03.kernel_us_per_token": None, "results.03.idle_us_per_token": None},
        ),
    ],
)
def test_a_command_writes_what_it_shows(command, name, cited, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench_generation, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.chdir(tmp_path)
    result = infer(*command.split(), "--model", folder, "--out", "reports")
    assert result.exit_code == 0, result.output
    line = json.loads(result.stdout.splitlines()[-1])
    stem = Path(f"reports/{name}-tiny-gemma3-{line['machine']}")
    assert {Path(f"{stem}{end}") for end in (".json", ".md")} <= set(stem.parent.iterdir())
    assert read_value(f"{stem}.json", "results") == line["results"]
    assert read_value(f"{stem}.json", "machine.torch_threads") == line["flags"]["threads"] == 1
    assert {key: read_value(f"{stem}.json", key) for key in cited} == cited
    if name == "profile-03":
        rows = {row["name"]: row for row in line["results"]["03"]["rows"]}
        assert rows["aten::linear"]["count_per_token"] == 7 * read_config(folder).num_layers + 1
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=0.01)
        assert f"{len(rows) - 3} more rows, " in result.stdout
        with gzip.open("trace.json.gz", "rt", encoding="utf-8") as file:
            assert any(event.get("name") == "aten::embedding" for event in json.load(file)["traceEvents"])


def test_segments_that_are_computed_again_are_as_if_concatenated(folder: Path) -> None:
    engines = segments.make_engines(Setup(str(folder)), 256)
    pieces = [[5 + (7 * n + 3 * token) % 90 for token in range(28)] for n in range(16)]
    found = segments.distances(engines, pieces, 3, 16, [None, 1.0])
    assert found[1.0]["kl"] == pytest.approx(0, abs=1e-6)
    assert found[1.0]["agreement"] == 1
    assert found[None]["kl"] > 1e-5


def test_prompts_of_every_length_and_batch_are_measured_beside_their_floor(tmp_path, monkeypatch) -> None:
    """Weights are made when they are read, for this test alone. A chunk's size is counted from the steps that ran."""
    monkeypatch.setattr(checkpoint, "safe_open", checkpoint.safe_open)
    monkeypatch.setattr(prompts, "measure_ceilings", lambda device: CEILINGS)
    sizes: dict[str, Any] = {
        "lengths": (8, 16, 4096),
        "batches": (1, 3),
        "sizes": (0, 8),
        "context": 8,
        "beside": 2,
        "long": 32,
    }
    report = prompts.measure("tiny-llama", device="cpu", **sizes)
    results = report.results
    assert [*results["first_token"]] == ["8", "16"], "a length that the model does not hold is left out"
    assert [*results["decoding"]] == ["1", "3"]
    assert {name: row["tokens_of_a_chunk"] for name, row in results["beside"].items()} == {"by default": 32, "8": 8}
    work = DecodeWork(parse_config(SHAPES["tiny-llama"], "tiny-llama"), torch.float32)
    floor = work.prompt_flops(8) / CEILINGS.matmul_flops_per_second
    assert results["first_token"]["8"]["floor_ms"] == pytest.approx(1e3 * floor, rel=1e-3)
    gated = results["gated"]["64"]
    assert gated["over_two_launches"] == pytest.approx(gated["tflop_per_second"] / gated["in_two_launches"], rel=1e-3)
    assert gated["of_products"] == pytest.approx(
        1e12 * gated["tflop_per_second"] / CEILINGS.matmul_flops_per_second, rel=1e-3
    )
    page = write_report(report, tmp_path, view=prompts.view(report))[1].read_text(encoding="utf-8")
    assert "| 16 |" in page.split("First token")[1]
    assert "| 64 |" in page.split("Gate and up of one layer")[1].split("First token")[0]


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_seen(folder: Path) -> None:
    """Our kernels are launched one by one from phase 3.1 on, and with whole steps where these are captured."""
    size, phases = GenerationSize(prompt_tokens=16, new_tokens=12, trials=1), ["02", "03", "03.1", NEWEST]
    found = measure_generation(
        str(folder), phases=phases, size=size, device="cuda", peers=["transformers_eager"]
    ).results
    profile = profile_generation.measure_profile(str(folder), device="cuda", prompt_tokens=16, steps=4).results[NEWEST]
    for result in (*(found[number] for number in phases), found["transformers_eager"], profile):
        assert (result["kernels_per_token"] > 10, result["kernel_us_per_token"] > 0) == (True, True)
    own = [found[number]["own_launches_per_token"] for number in phases]
    assert own[:2] == [0, 0]
    assert own[3] < 10 < own[2]
    assert profile["own_launches_per_token"] <= profile["host_launches_per_token"] < profile["kernels_per_token"]
    assert not any(row["name"].startswith("aten::") for row in profile["rows"])


def test_speculation_is_off_in_one_case_and_adapts_in_another(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each case, the drafts of a step's requests that were verified, per request and step."""
    verified: dict[tuple[Any, ...], float] = {}
    measured = speculation.tokens_per_second

    def counted(engine: Any, num_requests: int, num_steps: int) -> float:
        before = sum(engine.scheduler.num_drafts_by_position)
        speed = measured(engine, num_requests, num_steps)
        counts.append((sum(engine.scheduler.num_drafts_by_position) - before) / (num_requests * num_steps))
        return speed

    def one_after_the_other(calls: dict[Any, Any], *_: int, **__: int) -> dict[Any, list[float]]:
        found = {}
        for case, call in calls.items():
            counts.clear()
            found[case] = [call()]
            (verified[case[1:]],) = counts
        return found

    counts: list[float] = []
    monkeypatch.setattr(speculation, "tokens_per_second", counted)
    monkeypatch.setattr(speculation, "in_turns", one_after_the_other)
    speculation.measure_imposed(
        str(tiny_checkpoints["llama"]), lengths=(2,), acceptances=(0.9,), batches=(1,), trials=1
    )
    assert verified[speculation.PLAIN, 0, 0.0] == verified["off", 0, 0.0] == 0
    assert verified["ngram", 2, 0.9] >= 2
    assert 0 < verified["ngram", 0, 0.0] < 2
