"""The arithmetic of the roofline against numbers worked out by hand, and the command's words."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.device.datasheets import DATA_SHEETS
from benchmarks.roofline import DecodeWork, find_config
from benchmarks.views.roofline import duration, quantity
from shared.checkpoints.make import checkpoint_tensors
from shared.checkpoints.shapes import SHAPES
from shared.cli.roofline import roofline
from shared.cli.terminal import GuardedGroup
from shared.errors import ModelFolderError
from shared.loading.config_json import parse_config

H100_READ, H100_MATMUL = 3.02e12, 786e12  # measured


def work(shape: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> DecodeWork:
    return DecodeWork(parse_config(SHAPES[shape] | changes), dtype)


def infer(*arguments: object) -> Any:
    app = typer.Typer(cls=GuardedGroup)
    app.callback()(lambda: None)
    app.command("roofline")(roofline)
    return CliRunner().invoke(app, ["roofline", *map(str, arguments)])


def test_llama_by_hand() -> None:
    llama = work("llama-3.2-1b")
    assert llama.parameters == {
        "embedding": 128_256 * 2048,
        "attention projections": 16 * (2048 * 2048 + 2 * 512 * 2048 + 2048 * 2048),
        "MLP projections": 16 * 3 * 2048 * 8192,
        "norms and biases": (2 * 16 + 1) * 2048,
        "output head": 0,
    }
    assert llama.num_parameters == 1_235_814_400
    assert llama.weight_bytes == llama.resident_bytes == 2_471_628_800
    assert quantity(llama.weight_bytes, "B") == "2.472 GB"
    assert llama.row_bytes == 0  # the head reads the whole table anyway
    assert llama.kv_bytes_per_token == 2 * 16 * 8 * 64 * 2 == 32_768
    assert llama.kv_bytes(512) == 512 * 32_768
    assert llama.matmul_flops == 2 * (16 * (10_485_760 + 50_331_648) + 262_668_288)
    assert llama.attention_flops(512) == 16 * 4 * 32 * 64 * 512
    weights_alone = llama.weight_bytes / H100_READ
    assert round(1 / weights_alone) == 1222
    floor = llama.floor(512, H100_READ, H100_MATMUL)
    assert floor.is_memory_bound
    assert floor.memory_seconds == (2_471_628_800 + 16_777_216) / H100_READ
    assert floor.seconds == pytest.approx(824.0e-6, rel=1e-4)
    assert floor.tokens_per_second == pytest.approx(1213.6, rel=1e-4)
    assert floor.compute_seconds == pytest.approx(3.23e-6, rel=1e-3)


def test_qwen_by_hand() -> None:
    qwen = work("qwen3-1.7b")
    layer = 2048 * 2048 + 2 * 1024 * 2048 + 2048 * 2048 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    assert qwen.num_parameters == 28 * layer + 151_936 * 2048 + 2048 == 1_720_574_976
    assert qwen.weight_bytes == 3_441_149_952
    assert qwen.kv_bytes_per_token == 2 * 28 * 8 * 128 * 2 == 114_688
    assert qwen.parameters["norms and biases"] == 28 * (2 * 2048 + 2 * 128) + 2048


def test_gemma_by_hand_with_its_windows() -> None:
    gemma = work("gemma-3-1b")
    layer = 1024 * 1152 + 2 * 256 * 1152 + 1152 * 1024 + 3 * 1152 * 6912 + 4 * 1152 + 2 * 256
    assert gemma.num_parameters == 26 * layer + 262_144 * 1152 + 1152 == 999_885_952
    a_layer = 2 * 1 * 256 * 2  # bytes of one token in one layer
    assert gemma.kv_bytes_per_token == 26 * a_layer
    assert gemma.kv_bytes(512) == 26 * 512 * a_layer
    assert gemma.kv_bytes(2000) == (22 * 512 + 4 * 2000) * a_layer  # every sixth of 26 layers sees all
    assert gemma.attention_flops(2000) == 4 * 4 * 256 * (22 * 512 + 4 * 2000)


def test_of_an_embedding_that_is_not_the_head_one_row_is_read() -> None:
    tied, untied = work("llama-3.2-1b"), work("llama-3.2-1b", tie_word_embeddings=False)
    assert untied.parameters["output head"] == 128_256 * 2048
    assert untied.num_parameters == tied.num_parameters + 128_256 * 2048
    assert untied.weight_bytes == tied.weight_bytes
    assert untied.row_bytes == 2048 * 2
    assert untied.num_bytes(1, batch=3) == tied.num_bytes(1, batch=3) + 3 * 4096
    assert untied.matmul_flops == tied.matmul_flops


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_a_checkpoint(shape: str) -> None:
    tensors = dict(checkpoint_tensors(SHAPES[shape]))
    assert work(shape).num_parameters == sum(torch.Size(size).numel() for size in tensors.values())


def test_biases_are_read_and_not_multiplied() -> None:
    plain, biased = work("tiny-llama"), work("tiny-llama", attention_bias=True, mlp_bias=True)
    per_layer = 6 * 16 + 2 * 3 * 16 + 96 + 2 * 160 + 96
    assert biased.num_parameters - plain.num_parameters == 3 * per_layer
    assert biased.matmul_flops == plain.matmul_flops


def test_the_mean_over_contexts() -> None:
    gemma = work("tiny-gemma3", torch.float32)
    assert gemma.mean_kv_bytes(10, 19) == sum(gemma.kv_bytes(context) for context in range(10, 20)) / 10
    llama = work("llama-3.2-1b")
    assert llama.mean_kv_bytes(257, 511) == 384 * 32_768


def test_more_sequences_share_the_weights_alone() -> None:
    llama = work("llama-3.2-1b")
    one, many = llama.floor(64, H100_READ, H100_MATMUL), llama.floor(64, H100_READ, H100_MATMUL, batch=100)
    assert many.num_bytes == one.num_bytes + 99 * 64 * 32_768
    assert many.flops == 100 * one.flops
    assert many.tokens_per_second == pytest.approx(100 / many.seconds)


@given(
    shape=st.sampled_from(["llama-3.2-1b", "qwen3-8b", "gemma-3-1b", "tiny-qwen3"]),
    context=st.integers(1, 2000),
    bandwidth=st.floats(1e9, 1e13),
    rate=st.floats(1e10, 1e16),
)
def test_the_turning_batch_is_the_smallest_that_waits_for_arithmetic(
    shape: str, context: int, bandwidth: float, rate: float
) -> None:
    model = WORKS.setdefault(shape, work(shape))
    turning = model.turning_batch(context, bandwidth, rate)
    if turning is None:
        assert model.floor(context, bandwidth, rate, batch=1 << 20).is_memory_bound
        return
    if turning < 1 << 40:  # beyond, the difference of two nearly equal slopes is rounding
        slack = max(1, turning >> 20)
        assert not model.floor(context, bandwidth, rate, batch=turning + slack).is_memory_bound
        assert turning <= slack + 1 or model.floor(context, bandwidth, rate, batch=turning - 1 - slack).is_memory_bound


WORKS: dict[str, DecodeWork] = {}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2_471_628_800, "B", "2.472 GB"),
        (786e12, "FLOP/s", "786 TFLOP/s"),
        (3.02e12, "B/s", "3.020 TB/s"),
        (32_768, "B", "32.77 kB"),
        (135_168, "B", "135.2 kB"),
        (4096, "B", "4.096 kB"),
        (512, "B", "512 B"),
    ],
)
def test_quantities_are_readable(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_durations_are_readable() -> None:
    assert [duration(s) for s in (818.4e-6, 3.23e-6, 2.31e-3, 15.61e-3, 1.5)] == [
        "818.4 µs",
        "3.230 µs",
        "2.310 ms",
        "15.61 ms",
        "1.500 s",
    ]


def test_models_are_found_by_folder_and_by_shape(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    name, config = find_config(str(tiny_checkpoints["llama"]))
    assert name == "tiny-llama"
    assert config == find_config("tiny-llama")[1]
    with pytest.raises(ModelFolderError, match=r"neither a folder nor a known model.*llama-3\.2-1b"):
        find_config("nothing-of-the-kind")
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        find_config(str(tmp_path))


def test_the_command_shows_the_way_from_bytes_to_microseconds() -> None:
    result = infer("llama-3.2-1b", "--bandwidth", 3020, "--flops", 786)
    assert result.exit_code == 0, result.output
    for shown in (
        "all weights 1,235,814,400 2.472 GB",
        "32.77 kB for each token seen",
        "512 tokens seen: 16.78 MB",
        "2.488 GB / 3.020 TB/s = 824.0 µs",
        "no faster than 824.0 µs a token, 1,214 tokens/s: memory bound",
        "No batch is large enough to wait for arithmetic",
    ):
        assert shown in " ".join(result.stdout.split()), result.stdout


def test_the_command_as_json_with_a_data_sheet() -> None:
    found = json.loads(infer("qwen3-1.7b", "--gpu", "H100", "--batch", "1,4", "--context", 100, "--json").stdout)
    assert found["dtype"] == "bfloat16"
    assert found["weight_bytes"] == 3_441_149_952
    assert found["kv_bytes"] == 100 * 114_688
    assert "not measured" in found["ceilings"]["source"]
    assert found["ceilings"]["read_bytes_per_second"] == DATA_SHEETS["h100"].read_bytes_per_second == 3.35e12
    assert [floor["batch"] for floor in found["floors"]] == [1, 4]
    assert found["floors"][0]["seconds"] == (3_441_149_952 + 100 * 114_688) / 3.35e12
    assert found["compute_bound_from_batch"] == work("qwen3-1.7b").turning_batch(100, 3.35e12, 989e12)


def test_given_rates_replace_those_of_a_sheet() -> None:
    found = json.loads(infer("llama-3.2-1b", "--gpu", "l4", "--bandwidth", 250, "--json").stdout)
    assert found["ceilings"]["read_bytes_per_second"] == 250e9
    assert found["ceilings"]["matmul_flops_per_second"] == DATA_SHEETS["l4"].matmul_flops_per_second
    assert found["ceilings"]["source"].endswith("--bandwidth given")


def test_without_rates_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import hardware

    asked = []

    def measure(device: str) -> Any:
        asked.append(device)
        return SimpleNamespace(read_bytes_per_second=10e9, matmul_flops_per_second=1e11)

    monkeypatch.setattr(hardware, "measure_ceilings", measure)
    found = json.loads(infer("llama-3.2-1b", "--device", "cpu", "--json").stdout)
    assert asked == ["cpu"]
    assert found["dtype"] == "float32"
    assert found["weight_bytes"] == 2 * 2_471_628_800
    assert found["ceilings"]["source"] == "measured now"
    assert found["floors"][0]["memory_seconds"] == (4_943_257_600 + 512 * 65_536) / 10e9


def test_the_context_follows_the_model() -> None:
    found = json.loads(infer("tiny-llama", "--bandwidth", 1, "--flops", 1, "--json").stdout)
    assert found["context"] == 512
    assert found["dtype"] == "float32"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-model"], "no-such-model"),
        (["tiny-llama", "--context", "2049"], "--context is 2049"),
        (["tiny-llama", "--context", "0"], "--context is 0"),
        (["tiny-llama", "--batch", "4,x"], "--batch is '4,x'"),
        (["tiny-llama", "--batch", "0"], "--batch is '0'"),
        (["tiny-llama", "--gpu", "abacus"], "'abacus'"),
        (["tiny-llama", "--bandwidth", "0", "--flops", "1"], "--bandwidth is 0"),
        (["tiny-llama", "--bandwidth", "1", "--flops", "nan"], "--flops is nan"),
        (["tiny-llama", "--gpu", "h100", "--dtype", "float32"], "16-bit"),
        (["tiny-llama", "--gpu", "h100", "--dtype", "int3"], "int3"),
        (["tiny-llama", "--device", "cuda:77"], "cuda:77"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], told: str) -> None:
    result = infer(*arguments)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_each_data_sheet_is_sourced_and_plausible() -> None:
    for sheet in DATA_SHEETS.values():
        assert "data sheet" in sheet.source or "whitepaper" in sheet.source
        assert 50 < sheet.matmul_flops_per_second / sheet.read_bytes_per_second < 500
