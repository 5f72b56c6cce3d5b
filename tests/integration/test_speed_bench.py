"""Ladder, generation and profile on tiny models: real runs, and counts that hold on any machine."""

import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from typer.testing import CliRunner

from benchmarks import bench_generation, ladder, options, profile_generation, prompts
from benchmarks.bench_generation import GenerationSize, limit_bytes, measure_generation
from benchmarks.contenders import load_engine, load_transformers
from benchmarks.hardware import Ceilings
from benchmarks.report import Report, read_value, write_report
from benchmarks.roofline import DecodeWork
from benchmarks.setup import Setup
from benchmarks.step_trace import StepTrace, TraceWindow
from benchmarks.timing import Run, timed
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.lessons import find_lesson, lessons, newest_lesson
from shared.loading import checkpoint
from shared.loading.config_json import parse_config, read_config
from shared.tracks.ranks import group
from tests.waiting import PATIENCE

SIZE = GenerationSize(prompt_tokens=7, new_tokens=6, trials=2)
CEILINGS = Ceilings(2e9, 1e9, 1e10, None, None, "float32")
PHASES = [lesson.number for lesson in lessons() if lesson.generates and not ladder.has_ranks(lesson)]
NEWEST = newest_lesson().number
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: dict[str, Path]) -> Path:
    return tiny_checkpoints["gemma3_text"]


@pytest.fixture(scope="module", autouse=True)
def _few_requests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "TOGETHER", replace(ladder.TOGETHER, num_requests=24, new_tokens=(1, 20)))
        patch.setattr(ladder, "TOGETHER_SECONDS", PATIENCE)
        patch.setattr(ladder, "ARRIVALS", 50.0)  # at two a second, each rung would sleep for most of its time
        short = (each if each.phase == "09.2" else replace(each, max_tokens=8) for each in options.OPTIONS)
        patch.setattr(options, "OPTIONS", tuple(short))
        yield


@pytest.fixture(scope="module")
def rungs(folder: Path) -> Report:
    return ladder.measure_ladder(str(folder), prompt_tokens=5, new_tokens=4, trials=1, context_lengths=[3, 40])


@pytest.fixture(scope="module")
def generated(folder: Path) -> Report:
    return measure_generation(str(folder), phases=["02", "03"], size=SIZE, ceilings=CEILINGS, threads=1)


def infer(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu", "--threads", "1"])


def test_every_phase_that_generates_is_a_rung_and_answers_the_same(rungs: Report, folder: Path) -> None:
    assert list(rungs.results) == list(rungs.engines) == PHASES
    for result in rungs.results.values():
        assert result["equal_output"]
        assert list(result["ms_per_token"]) == ["3", "40"]
        assert min(*result["ms_per_token"].values(), result["time_to_first_token_ms"], result["speedup"]) > 0
    assert rungs.results["02"]["speedup"] == 1.0
    # Without a cache the i-th new token pays for prompt and answer so far; with one, every token is computed once.
    computed = [rungs.results[number]["tokens_computed"] for number in ("02", "03")]
    assert computed == [sum(5 + i for i in range(4)), 5 + 3]
    assert rungs.engines["02"]["model"] == folder.name
    assert str(folder.parent) not in json.dumps(rungs.to_dict())


def test_sixteen_requests_show_what_batching_and_blocks_buy(rungs: Report) -> None:
    """All have one KV cache: phases 4 and 5 cut it into four regions; in blocks it holds every request."""
    results, engines = rungs.results, rungs.engines
    assert [results[number]["tokens_per_forward"] for number in ("02", "03", "03.1")] == [1, 1, 1]
    assert 1 < results["04"]["tokens_per_forward"] < results["05"]["tokens_per_forward"] <= 4
    assert min(results[number]["tokens_per_forward"] for number in ("06", "06.1")) > 4
    regions = [engines[number]["max_batch_size"] * engines[number]["max_seq_len"] for number in ("04", "05")]
    blocks = [engines[number]["num_gpu_blocks"] * engines[number]["block_size"] for number in ("06", "06.1")]
    assert regions == blocks == [4 * 256] * 2
    for number, result in results.items():
        assert result["together_speedup"] == pytest.approx(
            result["together_tokens_per_second"] / results["02"]["together_tokens_per_second"], rel=2e-3
        )
        assert result["bought"] == find_lesson(number).bought
        assert (result["longest_wait_ms"] or 0) > 0 or number < "05"
        assert result["second_turn_ms"] > 0


def test_phases_whose_gain_must_be_asked_for_show_it_beside_their_default(rungs: Report) -> None:
    rows = {name: result["options"] for name, result in rungs.results.items() if "options" in result}
    assert {name: len(found) for name, found in rows.items()} == {"09.2": 2, "10": 2, "11": 2, "12": 2}
    assert "4 bits" not in [row["title"] for row in rows["10"]], "whose groups do not divide this model's rows"
    for found in rows.values():
        assert found[0]["speedup"] == 1.0
        for row in found:
            assert row["tokens_per_second"] > 0
            assert row["speedup"] == pytest.approx(row["tokens_per_second"] / found[0]["tokens_per_second"], rel=2e-3)
    plain, compressed = ((row["half_kv_blocks"], row["kv_blocks"]) for row in rows["09.2"])
    assert plain[1] >= plain[0] + 80 // 16, "memory grows with the answer"
    assert compressed[1] <= compressed[0] < plain[1], "and here it does not"
    whole, eight = (row["weight_bytes"] for row in rows["10"])
    assert whole > eight
    plain, drafted = (row["tokens_per_forward"] for row in rows["11"])
    assert plain == 1 <= drafted
    assert [row["valid_share"] for row in rows["12"]] == [0, 0], "8 random tokens end no object"
    shown = next(table for table in ladder.view(rungs).tables if table.heading == "What a phase buys if it is asked")
    assert len(shown.rows) == 8
    assert [shown.columns[-1].cell(row) for row in shown.rows] == ["–"] * 6 + ["0 %"] * 2


def test_an_answer_is_readable_if_it_is_an_object_of_both_keys() -> None:
    ada = '{"name": "Ada", "born": 1815}'
    born = [ada.replace("1815", other) for other in ('"1815"', "true")]
    assert options.is_person(ada)
    assert options.is_person('{"born": 1815, "name": ""}')
    for wrong in ('{"name": "Ada"}', *born, f"```json\n{ada}\n```", f"[{ada}]", ""):
        assert not options.is_person(wrong), wrong


def test_contexts_are_those_the_model_can_hold(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 210}))
    found = ladder.measure_ladder(str(tmp_path), prompt_tokens=2, new_tokens=2, trials=1, phases=[NEWEST, "2", "02"])
    assert (found.flags["contexts"], list(found.results)) == ([16, 32, 64, 128], ["02", NEWEST])


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
        ("ladder --phase 2 --trials 1 --new-tokens 3 --contexts 2,6", "ladder", {"results.02.tokens_computed": 15}),
        (
            "bench generation --phase 3 --trials 1 --new-tokens 3 --no-peers --pack-weights",
            "generation-packed",
            {"results.03.tokens_computed": 4 + 2, "results.ratios": {}, "engines.03.pack_weights": True},
        ),
        (
            "bench profile --phase 03 --steps 2 --top 3 --trace trace.json.gz",
            "profile-03",
            {"results.03.kernel_us_per_token": None, "results.03.idle_us_per_token": None},
        ),
    ],
)
def test_a_command_writes_what_it_shows(command, name, cited, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench_generation, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.chdir(tmp_path)
    result = infer(*command.split(), "--model", folder, "--prompt-tokens", 4, "--out", "reports")
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


def test_prompts_of_every_length_and_batch_are_measured_beside_their_floor(tmp_path, monkeypatch) -> None:
    """Weights are made when they are read, for this test alone. A chunk's size is counted from the steps that ran."""
    monkeypatch.setattr(checkpoint, "safe_open", checkpoint.safe_open)
    monkeypatch.setattr(group, "START", group.START)
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
    shape = parse_config(SHAPES["tiny-llama"], "tiny-llama")
    H, L = shape.hidden_size, shape.num_layers
    weights = L * H * (2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + 3 * shape.intermediate_size)
    causal = 4 * shape.num_heads * shape.head_dim * L * sum(range(1, 9))
    floor = (2 * 8 * weights + 2 * shape.vocab_size * H + causal) / CEILINGS.matmul_flops_per_second
    assert results["first_token"]["8"]["floor_ms"] == pytest.approx(1e3 * floor, rel=1e-3)
    paths = write_report(report, tmp_path, view=prompts.view(report))
    assert "16" in paths[1].read_text(encoding="utf-8")


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
