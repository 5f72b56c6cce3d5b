"""What every benchmark relies on: timing, the machine's name, reports, and the roofline's arithmetic."""

import json
import os
import re
import socket
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import command, hardware, machine, timing
from benchmarks.report import Report, describe_model, engine_settings, read_value, write_report
from benchmarks.roofline import DecodeWork
from benchmarks.timing import SyntheticPrompts, answer_with, in_turns, rotated, run, timed
from benchmarks.view import Bar, Bars, Column, Table, View, table_of, text
from shared.checkpoints.make import checkpoint_tensors
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, ModelFolderError
from shared.loading.config_json import parse_config


class SlowEngine:
    """By a clock of its own it takes ``first`` seconds for the first token and ``later`` for each one after it."""

    def __init__(self, first: float, later: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.later, self.now, self.computed, self.was_closed = first, later, 7.0, 100, False
        self.stats = lambda: {"tokens computed": self.computed}
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def generate(self, prompt_ids, params):
        assert (params.is_greedy, params.ignore_eos) == (True, True)
        try:
            for index in range(params.max_new_tokens):
                self.now += self.later if index else self.first
                self.computed += len(prompt_ids) if index == 0 else 1
                yield SimpleNamespace(token_id=index)
        finally:
            self.was_closed = True


def test_the_first_token_is_not_part_of_the_decode_speed(monkeypatch):
    found = run(SlowEngine(0.5, 0.25, monkeypatch), [1, 2, 3], 6)
    assert (found.token_ids, found.tokens_computed) == ([0, 1, 2, 3, 4, 5], 3 + 5)
    assert found.times == [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    assert (found.decode_tokens_per_second, found.intervals) == (4.0, [0.25] * 5)


@pytest.mark.parametrize(("seconds", "number"), [(0.0, 2), (0.6, 3)])
def test_a_slow_engine_is_cut_off_but_gives_the_least_number(seconds, number, monkeypatch):
    engine = SlowEngine(0.0, 0.25, monkeypatch)
    found = timed(partial(answer_with, engine), [1], 1000, min_decoded=2, max_seconds=seconds)
    assert (len(found.intervals), engine.was_closed) == (number, True)


def test_turns_rotate_and_prompts_repeat_with_the_seed_alone():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    first, second, third = SyntheticPrompts(50, 3), SyntheticPrompts(50, 3), SyntheticPrompts(50, 4)
    drawn = [first.draw(20), first.draw(20)]
    assert drawn == [second.draw(20), second.draw(20)]
    assert drawn[1] != drawn[0] != third.draw(20)
    assert all(type(token_id) is int and 0 <= token_id < 50 for token_id in drawn[0])


def test_the_command_reports_bandwidth_and_on_a_cpu_no_launches(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CPU_BUFFER_BYTES", 1 << 24)
    result = CliRunner().invoke(app, ["bench", "hardware", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    assert min(found["copy_gb_per_second"], found["read_gb_per_second"], found["matmul_tflop_per_second"]) > 0
    assert found["launch_eager_us"] is found["launch_graph_us"] is None
    written = tmp_path / f"hardware-{machine.machine_name('cpu')}.json"
    assert json.loads(written.read_text())["results"] == found


@given(set_bytes=st.integers(1, 1 << 31), cache=st.integers(1, 1 << 28))
def test_the_sets_fill_the_cache_four_times_with_none_to_spare(set_bytes, cache):
    sets = timing.num_input_sets(set_bytes, cache)
    assert 2 <= sets <= timing.MOST_INPUT_SETS
    assert sets == timing.MOST_INPUT_SETS or sets * set_bytes >= 4 * cache
    assert sets == 2 or (sets - 1) * set_bytes < 4 * cache


@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), sets=st.integers(2, 5))
def test_no_two_sets_share_a_cache_line(shape, sets):
    tensors = timing.rotated_tensors(
        sets, tuple(shape), torch.bfloat16, torch.device("cpu"), lambda rows: rows.fill_(3)
    )
    for before, after in pairwise(tensor.data_ptr() for tensor in tensors):
        assert (after - before) % timing.ALIGNMENT == 0
        assert after - before >= tensors[0].numel() * 2
    assert all(tensor.shape == tuple(shape) and (tensor == 3).all() for tensor in tensors)


@pytest.mark.measured
@pytest.mark.gpu
def test_a_gpu_reads_as_fast_as_it_copies_a_graph_launches_cheaper_and_the_cache_is_faster():
    measured = hardware.measure_ceilings("cuda")
    assert 0.7 < measured.read_bytes_per_second / measured.copy_bytes_per_second < 1.5
    assert 0 < (measured.launch_seconds_graph or 0) < (measured.launch_seconds_eager or 0) < 1e-3
    cache = timing.cache_bytes(torch.device("cuda"))
    x = torch.randn(cache // 16, device="cuda")  # of fp32: a quarter of the cache
    many = [(x.clone(),) for _ in range(timing.num_input_sets(x.nbytes, cache))]
    assert timing.time_calls(torch.sum, many) > timing.time_calls(torch.sum, [(x,)])


RESULTS = {
    "02": {"decode_tokens_per_second": 7.5, "ms_per_token": {"16": 41.2}, "trials": [7.4, 7.5]},
    "03": {"decode_tokens_per_second": 20.0, "ms_per_token": {"16": 35.5}},
    "03.1": {"decode_tokens_per_second": 31.0, "ms_per_token": {"16": 30.5}, "peer": None},
}


@pytest.fixture
def report() -> Report:
    model = {"name": "owner/some model", "revision": None, "config_sha256": "0" * 64, "config": {"hidden_size": 8}}
    config = EngineConfig(model="/somewhere/on/disk", use_speculative_decoding=True, adapter="/somewhere/else")
    engines = {"02": engine_settings(config, model["name"])}
    return Report("ladder", model, engines, seed=7, flags={"trials": 2}, results=RESULTS)


def test_the_file_tells_everything_and_no_path(report, tmp_path):
    rows = [{"name": number} | result for number, result in RESULTS.items()]
    columns = [text("phase", "name"), Column("tok/s", "decode_tokens_per_second")]
    panel = Bars("Speed", [("", [Bar(row["name"], row["decode_tokens_per_second"], "") for row in rows])])
    view = View("Speed: a model", ["about"], [Table("", columns, rows)], panels=[panel])
    paths = write_report(report, tmp_path / "a" / "b", view=view)
    stem = f"ladder-owner-some-model-{machine.machine_name('cpu')}"
    assert [path.name for path in paths] == [stem + end for end in (".json", ".md", ".png")]
    content = json.loads(paths[0].read_text())
    assert (content["schema"], content["seed"], content["results"]) == (1, 7, RESULTS)
    settings = engine_settings(EngineConfig(), "owner/some model")
    assert content["engines"]["02"] == settings | {"use_speculative_decoding": True, "adapter": "else"}
    assert {"python", "torch", "transformers"} <= set(content["versions"])
    assert "/somewhere" not in paths[0].read_text()
    assert "| 03.1 | 31.0 |" in paths[1].read_text()
    assert paths[2].stat().st_size > 1000
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(report, paths[0] / "reports", view=view)


def test_a_command_has_an_option_for_each_argument_and_ends_with_one_json_line(tmp_path, monkeypatch, capsys):
    def measure(model: str, trials: int = 3, dtype: str | None = None, sizes: tuple[int, ...] = (1, 8), peers=True):
        found = {"one": {"trials": trials, "of": sizes, "peers": peers}, "two": {"list": [1]}}
        return Report(model, {"name": "tiny"}, {}, 0, {"dtype": dtype}, found)

    def view(report: Report) -> View:
        return View("A view", [], [table_of("", "row", report.results, peers=str)])

    asked = "x --model m --trials 5 --sizes 2 16 --no-peers --out"
    monkeypatch.setattr("sys.argv", [*asked.split(), str(tmp_path)])
    command.run(measure, view, "A description.")
    lines = capsys.readouterr().out.splitlines()
    found = {"one": {"trials": 5, "of": [2, 16], "peers": False}, "two": {"list": [1]}}
    assert json.loads(lines[-1])["results"] == found
    (file,) = tmp_path.glob("*.json")
    assert read_value(file, "results") == found
    assert "| one | 5.00 | False |" in file.with_suffix(".md").read_text()
    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit):
        command.run(measure, view, None)
    assert "--model" in capsys.readouterr().err


def test_turns_go_forwards_and_backwards_after_a_warm_up():
    order: list[str] = []
    found = in_turns({name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}, 2, warm_ups=1)
    assert ("".join(order), found) == ("abbaab", {"a": [4.0, 5.0], "b": [3.0, 6.0]})


def test_a_value_is_read_by_its_dotted_key_and_a_missing_one_names_those_there_are(report, tmp_path):
    path = write_report(report, tmp_path, view=View("Speed: a model", [], []))[0]
    found = {"results.02.ms_per_token.16": 41.2, "results.03.1.peer": None, "results.02.trials.1": 7.5, "seed": 7}
    assert {key: read_value(path, key) for key in found} == found
    for key, told in (
        ("results.04.speedup", "results has 02, 03, 03.1"),
        ("results.03.1.speed", "results.03.1 has decode_tokens_per_second"),
        ("results.02.trials.-1", "results.02.trials has 0, 1"),
        ("seed.x", "seed has nothing"),
        ("", "its top level has"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_value(path, key)
    path.write_text("{")
    for wrong in (path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=wrong.name):
            read_value(wrong, "seed")


def test_a_model_is_described_by_name_revision_shape_and_checksum(tmp_path):
    folder = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "/secret/place"}')
    described = describe_model(str(folder))
    assert (described["name"], described["revision"], described["config"]) == (
        "owner/name",
        "abc123",
        {"hidden_size": 8},
    )
    plain = folder.rename(tmp_path / "my-model")
    assert describe_model(str(plain)) == described | {"name": "my-model", "revision": None}
    (plain / "config.json").write_text("{}")
    assert describe_model(str(plain))["config_sha256"] != described["config_sha256"]
    with pytest.raises(ModelFolderError):
        describe_model(str(folder))


def test_the_machine_is_named_by_what_computes_and_not_by_whose_it_is():
    found = machine.describe_machine()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert (found["gpu"] is None) == (found["num_gpus"] == 0)
    words = set(re.findall(r"[\w.-]+", json.dumps(found)))
    assert socket.gethostname() not in words
    assert not any(path != Path("/") and str(path) in json.dumps(found) for path in (Path.home(), Path.cwd()))


@pytest.mark.parametrize(
    ("cpu", "threads", "name", "title"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", 2, "cpu-2x-xeon-2.5ghz", "Intel Xeon 2.5GHz, 2 threads"),
        ("AMD EPYC 7763 64-Core Processor", 99, "cpu-64x-epyc-7763", "AMD EPYC 7763 64-Core, 64 threads"),
        ("", 3, "cpu-3x-unknown", "3 threads"),
    ],
)
def test_a_processor_gets_a_short_name(monkeypatch, cpu, threads, name, title):
    monkeypatch.setattr(machine, "cpu_model", lambda: cpu)
    monkeypatch.setattr(machine, "num_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert (machine.machine_name("cpu"), machine.machine_title("cpu")) == (name, title)


def work(shape: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DecodeWork:
    return DecodeWork(parse_config(SHAPES[shape] | changes), dtype)


def infer(arguments: str) -> Any:
    return CliRunner().invoke(app, ["roofline", *arguments.split()])


def test_llama_by_hand() -> None:
    llama = work("llama-3.2-1b")
    assert llama.num_parameters == 1_235_814_400
    assert llama.weight_bytes == llama.resident_bytes == 2_471_628_800
    assert llama.row_bytes == 0  # the head reads the whole table anyway
    assert llama.kv_bytes(512) == 512 * llama.kv_bytes_per_token == 512 * 2 * 16 * 8 * 64 * 2
    assert llama.mean_kv_bytes(257, 511) == 384 * 32_768
    assert llama.matmul_flops == 2 * (16 * (10_485_760 + 50_331_648) + 262_668_288)
    assert llama.attention_flops(512) == 16 * 4 * 32 * 64 * 512
    floor, many = (llama.floor(512, 3.02e12, 786e12, batch) for batch in (1, 100))  # as an H100 was measured
    assert floor.seconds == floor.memory_seconds == (2_471_628_800 + 16_777_216) / 3.02e12
    assert floor.compute_seconds == pytest.approx(3.23e-6, rel=1e-3)
    assert many.num_bytes == floor.num_bytes + 99 * 512 * 32_768  # more sequences share the weights alone
    assert many.flops == 100 * floor.flops
    assert many.tokens_per_second == pytest.approx(100 / many.seconds)


def test_a_prompt_by_hand() -> None:
    """In the last layer, tokens before the last need keys and values alone; one with a window sees no more than it."""
    llama, layer, kv = work("llama-3.2-1b"), 10_485_760 + 50_331_648, 2 * 2048 * 512
    products = 100 * (15 * layer + kv) + layer - kv + 262_668_288
    assert llama.prompt_flops(100) == 2 * products + 4 * 32 * 64 * (15 * 5050 + 100)
    assert llama.prompt_flops(1) == llama.flops(1)
    gemma = work("gemma-3-1b", num_hidden_layers=2, sliding_window=16, sliding_window_pattern=2)
    gained = gemma.prompt_flops(101) - gemma.prompt_flops(100)
    layer, kv = (gemma.matmul_flops // 2 - gemma.config.vocab_size * gemma.config.hidden_size) // 2, 2 * 1152 * 256
    assert gained == 2 * (layer + kv) + 4 * 4 * 256 * (16 + 1)


def test_blocks_of_fewer_bits_by_hand() -> None:
    qwen, blocks = work("qwen3-8b"), 6_945_767_424  # parameters of the matrices
    for bits in (8, 4.125):
        narrow = replace(qwen, weight_bits=bits)
        assert qwen.weight_bytes - narrow.weight_bytes == 2 * blocks - bits * blocks / 8
        assert qwen.resident_bytes - narrow.resident_bytes == 2 * blocks - bits * blocks / 8
        assert narrow.flops(512) == qwen.flops(512)
        assert narrow.kv_bytes(512) == qwen.kv_bytes(512)
    found = json.loads(infer("qwen3-8b --gpu h100 --weight-bits 4.125 --json").stdout)
    assert (found["weight_bits"], found["weight_bytes"]) == (4.125, narrow.weight_bytes)
    assert "4.125 bits a weight of the blocks" in infer("qwen3-8b --gpu h100 --weight-bits 4.125").stdout


def test_gemma_by_hand_with_its_windows() -> None:
    gemma, a_layer = work("gemma-3-1b"), 2 * 1 * 256 * 2  # bytes of one token in one layer
    assert gemma.kv_bytes_per_token == 26 * a_layer
    assert gemma.kv_bytes(2000) == (22 * 512 + 4 * 2000) * a_layer  # every sixth of 26 layers sees all
    assert gemma.attention_flops(2000) == 4 * 4 * 256 * (22 * 512 + 4 * 2000)
    assert gemma.mean_kv_bytes(510, 513) == sum(map(gemma.kv_bytes, range(510, 514))) / 4


def test_one_row_of_an_embedding_that_is_not_the_head_and_biases_that_are_not_multiplied() -> None:
    tied, untied = work("llama-3.2-1b"), work("llama-3.2-1b", tie_word_embeddings=False)
    assert untied.weight_bytes == tied.weight_bytes
    assert untied.num_bytes(1, batch=3) == tied.num_bytes(1, batch=3) + 3 * 4096
    plain, biased = work("tiny-llama"), work("tiny-llama", attention_bias=True, mlp_bias=True)
    assert biased.num_parameters - plain.num_parameters == 3 * (6 * 16 + 2 * 3 * 16 + 96 + 2 * 160 + 96)
    assert (untied.matmul_flops, biased.matmul_flops) == (tied.matmul_flops, plain.matmul_flops)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_a_checkpoint(shape: str) -> None:
    tensors = dict(checkpoint_tensors(SHAPES[shape]))
    assert work(shape).num_parameters == sum(torch.Size(size).numel() for size in tensors.values())


WORKS = [work(shape) for shape in ("llama-3.2-1b", "gemma-3-1b", "tiny-qwen3")]


@given(st.sampled_from(WORKS), st.integers(1, 2000), st.floats(1e9, 1e13), st.floats(1e10, 1e16))
def test_the_turning_batch_is_the_smallest_that_waits_for_arithmetic(model, context, bandwidth, rate) -> None:
    turning = model.turning_batch(context, bandwidth, rate)
    if turning is None:
        assert model.floor(context, bandwidth, rate, batch=1 << 20).is_memory_bound
    elif turning < 1 << 40:  # beyond, the difference of two nearly equal slopes is rounding
        slack = max(1, turning >> 20)
        assert not model.floor(context, bandwidth, rate, batch=turning + slack).is_memory_bound
        assert turning <= slack + 1 or model.floor(context, bandwidth, rate, batch=turning - 1 - slack).is_memory_bound


def test_rates_are_measured_or_a_data_sheets_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = SimpleNamespace(read_bytes_per_second=10e9, matmul_flops_per_second=1e11)
    monkeypatch.setattr(hardware, "measure_ceilings", lambda device: measured)
    found = json.loads(infer("llama-3.2-1b --device cpu --json").stdout)
    assert (found["dtype"], found["ceilings"]["source"]) == ("float32", "measured now")
    assert found["floors"][0]["memory_seconds"] == (4_943_257_600 + 512 * 65_536) / 10e9
    found = json.loads(infer("qwen3-1.7b --gpu H100 --batch 1,4 --context 100 --json").stdout)
    assert (found["dtype"], found["weight_bytes"], found["kv_bytes"]) == ("bfloat16", 3_441_149_952, 100 * 114_688)
    assert found["ceilings"]["source"].startswith("not measured: NVIDIA H100 data sheet")
    assert [floor["batch"] for floor in found["floors"]] == [1, 4]
    assert found["compute_bound_from_batch"] == work("qwen3-1.7b").turning_batch(100, 3.35e12, 989e12)
    found = json.loads(infer("llama-3.2-1b --gpu l4 --bandwidth 250 --json").stdout)["ceilings"]
    assert (found["read_bytes_per_second"], found["matmul_flops_per_second"]) == (250e9, 121e12)
    assert found["source"].endswith("--bandwidth given")
    found = json.loads(infer("llama-3.2-1b --bandwidth 250 --flops 2 --json").stdout)
    assert (found["dtype"], found["ceilings"]["source"]) == ("bfloat16", "as given"), "nothing is measured"
    assert list(found["ceilings"].values())[-2:] == [250e9, 2e12]
