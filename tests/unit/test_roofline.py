"""The arithmetic of the roofline against numbers worked out by hand, and the command's words."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import hardware
from benchmarks.roofline import DecodeWork, find_config
from shared.checkpoints.make import checkpoint_tensors
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.errors import ModelFolderError
from shared.loading.config_json import parse_config


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
    assert floor.is_memory_bound
    assert floor.seconds == floor.memory_seconds == (2_471_628_800 + 16_777_216) / 3.02e12
    assert floor.compute_seconds == pytest.approx(3.23e-6, rel=1e-3)
    assert many.num_bytes == floor.num_bytes + 99 * 512 * 32_768  # more sequences share the weights alone
    assert many.flops == 100 * floor.flops
    assert many.tokens_per_second == pytest.approx(100 / many.seconds)


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
def test_the_turning_batch_is_the_smallest_that_waits_for_arithmetic(
    model: DecodeWork, context: int, bandwidth: float, rate: float
) -> None:
    turning = model.turning_batch(context, bandwidth, rate)
    if turning is None:
        assert model.floor(context, bandwidth, rate, batch=1 << 20).is_memory_bound
    elif turning < 1 << 40:  # beyond, the difference of two nearly equal slopes is rounding
        slack = max(1, turning >> 20)
        assert not model.floor(context, bandwidth, rate, batch=turning + slack).is_memory_bound
        assert turning <= slack + 1 or model.floor(context, bandwidth, rate, batch=turning - 1 - slack).is_memory_bound


def test_models_are_found_by_folder_and_by_shape(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    assert find_config(str(tiny_checkpoints["llama"])) == find_config("tiny-llama")
    with pytest.raises(ModelFolderError, match=r"no config\.json"):
        find_config(str(tmp_path))


def test_the_command_shows_the_way_from_bytes_to_microseconds() -> None:
    shown = " ".join(infer("llama-3.2-1b --bandwidth 3020 --flops 786").stdout.split())
    assert "all weights 1,235,814,400 2.472 GB" in shown
    assert "2.488 GB / 3.020 TB/s 824.0 µs" in shown
    assert "floor 1,214 tokens/s: memory bound 824.0 µs" in shown


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("no-such-model", "neither a folder nor a known model"),
        ("tiny-llama --context 2049", "--context is 2049"),
        ("tiny-llama --batch 4,x", "--batch is '4,x'"),
        ("tiny-llama --gpu abacus", "'abacus'"),
        ("tiny-llama --bandwidth 0 --flops 1", "--bandwidth is 0"),
        ("tiny-llama --bandwidth 1 --flops nan", "--flops is nan"),
        ("tiny-llama --gpu h100 --dtype float32", "16-bit"),
        ("tiny-llama --gpu h100 --dtype int3", "int3"),
        ("tiny-llama --device cuda:77", "cuda:77"),
    ],
)
def test_what_the_command_refuses(arguments: str, told: str) -> None:
    result = infer(arguments)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.stderr.split())
