"""Weights of 8 and 4 bits: rounding, products, refusals of formats, and written checkpoints.

A written checkpoint is compared with what transformers reads where compressed-tensors is installed.
"""

import dataclasses
import json
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shared.cache.view.uncached import UncachedView
from shared.checkpoints.make import make_checkpoint
from shared.checkpoints.quantize import quantize_checkpoint
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.errors import ConfigError, ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.models.projection import Projection
from shared.models.quantized import QuantizedProjection
from shared.models.tokens import Tokens
from shared.ops import quantized as op
from shared.ops.gated import swiglu
from shared.ops.quantized import TILE_ROWS
from shared.quantization.formats.detect import detect_format
from shared.quantization.rounding import METHODS, quantize
from shared.quantization.weight import (
    QuantizedWeight,
    concatenate,
    dequantize,
    mergeable,
    pack_nibbles,
    unpack_nibbles,
)
from tests.comparison import assert_equal
from tests.stored_weights import Store, awq, eight_bits, fp8_blocks, gptq, packed_groups

N, K, G = 48, 256, 128
NAME, WEIGHTS = "model.layers.0.mlp.up_proj", "model.safetensors"


def logits(model: CausalLM) -> torch.Tensor:
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        return model.logits(model(Tokens(ids, torch.arange(37)), UncachedView([37])))


def plainly(model: CausalLM) -> CausalLM:
    """The same model with its quantized matrices in fp32."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedProjection):
            N, K = module.weight.shape
            plain = Projection(K, N)
            plain.weight = torch.nn.Parameter(dequantize(module.weight), requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)
    return model


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NUMBERS = {
    "fp8": (FP8[FP8.isfinite()], 448.0),
    "int8": (torch.arange(-127, 128), 127.0),
    "int4": (torch.arange(-8, 8), 7.5),
}


@pytest.mark.parametrize("method", METHODS)
def test_rounding_is_as_near_as_the_format_allows(method: str) -> None:
    """In units of a scale, of which the largest magnitude of its row or group has as many as the format allows."""
    weight, (numbers, most) = torch.randn(N, K) * torch.logspace(-3, 3, N)[:, None], NUMBERS[method]
    weight[5] = 0
    rounded = quantize(weight, method)
    largest = weight.unflatten(1, (-1, rounded.columns_per_scale)).abs().amax(2)
    assert torch.equal(rounded.scales, torch.where(largest > 0, largest / most, 1))
    scales = rounded.scales.repeat_interleave(rounded.columns_per_scale, 1)
    least = ((weight / scales)[..., None] - numbers).abs().amin(-1)
    assert ((dequantize(rounded) - weight).abs() <= least * scales + weight.abs() * 2**-22).all()


def test_more_rows_may_share_a_scale_than_are_dequantized_at_once() -> None:
    """As where matrices with a scale each stand one below the other."""
    values = torch.arange(3 * TILE_ROWS)[:, None].expand(-1, 8).to(torch.int8)
    weight = QuantizedWeight(values, torch.tensor([[0.5], [2.0]]), None, 8, 3 * TILE_ROWS // 2)
    assert_near(op.linear(torch.eye(8), weight), dequantize(weight).t(), 1e-6)


def test_int4_needs_groups() -> None:
    """The largest that divide its rows."""
    found = [quantize(torch.randn(2, columns), "int4").columns_per_scale for columns in (256, 192, 96)]
    assert found == [128, 64, 32]
    with pytest.raises(ConfigError, match=r"divisible by 32.*\[48, 72\].*'int8' or 'fp8'"):
        quantize(torch.randn(N, 72), "int4")


@pytest.mark.parametrize("run", [32, 64, 128])
def test_nibbles(run: int) -> None:
    numbers = torch.randint(0, 16, (N, K))
    packed = pack_nibbles(numbers, run)
    assert packed[3, 1] == numbers[3, 1] + 16 * numbers[3, 1 + run // 2]
    assert torch.equal(unpack_nibbles(packed, run), numbers.to(torch.uint8))
    weight = QuantizedWeight(pack_nibbles(numbers, 128), torch.ones(N, 1), None, K)
    assert torch.equal(dequantize(weight), numbers - 8.0), "a scale of more columns than are packed together"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_product_is_that_of_the_dequantized_matrix(method: str, num_rows: int) -> None:
    for columns in (K, 33)[: 1 if method == "int4" else 2]:  # those of PyTorch's product, and others
        weight, x = quantize(torch.randn(3000, columns), method), torch.randn(num_rows, columns)
        wanted = x.double() @ dequantize(weight).double().T + (bias := torch.randn(3000))
        assert_near(op.linear(x, weight, bias), wanted.float(), 2**-7 if method == "int8" else 1e-6)


@pytest.mark.parametrize(
    ("rows", "sizes", "merged_size"),
    [((256, 128), (128, 128), 128), ((200, 56, 130), (128,) * 3, 1), ((128, 8), (128, 1), 1), ((8, 128), (1, 128), 1)],
)
def test_blocks_of_merged_matrices_keep_their_scales(
    rows: tuple[int, ...], sizes: tuple[int, ...], merged_size: int
) -> None:
    weights = [
        QuantizedWeight(torch.randn(n, K).to(torch.float8_e4m3fn), torch.rand(-(-n // size), 2), None, 128, size)
        for n, size in zip(rows, sizes, strict=True)
    ]
    merged = concatenate(weights)
    assert torch.equal(dequantize(merged), torch.cat([dequantize(weight) for weight in weights]))
    assert merged.rows_per_scale == merged_size


@pytest.mark.parametrize(("methods", "num_parts"), [(("fp8", "fp8"), 0), (("fp8", "int8"), 2), ((None, "fp8"), 2)])
def test_matrices_of_the_same_x_are_one_or_if_their_formats_differ_apart(
    methods: tuple[str | None, ...], num_parts: int
) -> None:
    plain: list[torch.nn.Module] = []
    for method in methods:
        one = Projection(K, N, bias=True)
        one.weight, one.bias = (torch.nn.Parameter(torch.randn(*size), requires_grad=False) for size in ((N, K), (N,)))
        plain.append(one if method is None else QuantizedProjection(one, quantize(one.weight, method)))
    x, residual, norm = torch.randn(3, K), torch.randn(3, N), RMSNorm(K, 1e-6)
    norm.weight = torch.nn.Parameter(torch.rand(K), requires_grad=False)
    found = QuantizedProjection.fused(plain)
    assert len(found.parts) == num_parts
    gate, up = (one(norm(x)) for one in plain)
    assert_near(found(x, norm), torch.cat([gate, up], 1), 1e-5)
    assert_near(found(x, norm, residual, activation=swiglu), swiglu(gate, up) + residual, 1e-5)


def test_zeros_of_merged_matrices_of_which_one_has_none() -> None:
    plain, other = (quantize(torch.randn(n, K), "int4") for n in (3, 5))
    other = dataclasses.replace(other, zeros=torch.randint(16, other.scales.shape, dtype=torch.uint8))
    for weights in product((plain, other), repeat=2):
        assert torch.equal(dequantize(concatenate(weights)), torch.cat([dequantize(weight) for weight in weights]))
    assert not mergeable([plain, quantize(torch.randn(3, K), "int4", 64)]), "groups of other sizes"
    assert not mergeable([plain, dataclasses.replace(plain, scales=plain.scales.half())]), "scales of other dtypes"


# Formats.


def scheme(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": G, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CT = {"quant_method": "compressed-tensors", "transform_config": {}, "quantization_status": "compressed"}
CT |= {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
PACKED = scheme(num_bits=4, type="int", strategy="group", group_size=G)
STORED: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8 in blocks": (BLOCKS, fp8_blocks),
    "int8, a scale a row": (
        CT | {"format": "int-quantized", "config_groups": scheme(num_bits=8, type="int", strategy="channel")},
        eight_bits,
    ),
    "packed int4": (
        CT | {"format": "pack-quantized", "config_groups": PACKED},
        partial(packed_groups, group=G, zeros=False),
    ),
    "gptq": (GPTQ, partial(gptq, group=G, zeros=True)),
    "awq": (AWQ, partial(awq, group=G, zeros=True)),
}


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "told"),
    [
        ("gptq", {"quant_method": "hqq"}, {}, "quant_method 'hqq'.*supported are fp8, compressed-tensors, gptq, awq"),
        ("gptq", {"quant_method": ["gptq"]}, {}, r"quant_method \['gptq'\]"),
        ("gptq", {"bits": 3}, {}, "bits 3, which is not supported; supported is 4"),
        ("gptq", {"group_size": -1}, {}, "group_size -1.*32, 64, 128"),
        ("gptq", {"checkpoint_format": "marlin"}, {}, "checkpoint_format 'marlin'"),
        (
            "gptq",
            {"checkpoint_format": "gptq_v2", "format": "gptq"},
            {},
            r"format \['gptq_v2', 'gptq'\].*the same in both",
        ),
        ("gptq", {"rotation": "hadamard"}, {}, "rotation 'hadamard', which is not supported"),
        ("awq", {"format": "llm-awq"}, {}, "format 'llm-awq'.*'gemm'"),
        ("fp8 in blocks", {"modules_to_convert": ["lm_head"]}, {}, r"modules_to_convert \['lm_head'\]"),
        (
            "int8, a scale a row",
            {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            {},
            "transform_config {'config_groups': .*supported is a checkpoint without it",
        ),
        ("int8, a scale a row", {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparsity_config .*'dense'"),
        (
            "int8, a scale a row",
            {"config_groups": scheme(num_bits=8, type="int", strategy="channel", block_structure=[16, 16])},
            {},
            r"group_0\.weights\.block_structure \[16, 16\]",
        ),
        ("packed int4", {"config_groups": scheme(num_bits=4, type="int", actorder="group")}, {}, "actorder 'group'"),
        ("gptq", {}, {"g_idx": torch.arange(K).int() % 2}, r"up_proj\.g_idx.*act-order"),
        ("awq", {"version": "gemv"}, {}, "version 'gemv'.*'gemm'"),
        ("fp8 in blocks", {"weight_block_size": [64, 64]}, {}, r"weight_block_size \[64, 64\]"),
        ("fp8 in blocks", {"fmt": "e4m3fnuz"}, {}, "fmt 'e4m3fnuz'.*'e4m3'"),
        ("fp8 in blocks", {}, {"weight": torch.zeros(N, K)}, r"up_proj\.weight.*float32.*must be float8_e4m3fn"),
        ("fp8 in blocks", {}, {"weight_scale_inv": torch.ones(2, 1)}, r"weight_scale_inv.*\[2, 1\].*\[1, 2\]"),
        ("fp8 in blocks", {}, {"weight_scale_inv": torch.tensor([[1.0, float("inf")]])}, r"scale inf at \[0, 1\]"),
        ("int8, a scale a row", {}, {"weight_scale": torch.zeros(N, 1)}, r"weight_scale.*scale 0.0 at \[0, 0\]"),
        ("int8, a scale a row", {"format": "marlin-24"}, {}, "format 'marlin-24'.*int-quantized"),
        (
            "int8, a scale a row",
            {"config_groups": scheme(num_bits=8, type="int", strategy="channel", symmetric=False)},
            {},
            "symmetric: False",
        ),
        ("packed int4", {"config_groups": scheme(num_bits=2, type="int")}, {}, r"\('int', 2\)"),
        (
            "packed int4",
            {"config_groups": scheme(num_bits=4, type="int", strategy="channel", group_size=32)},
            {},
            r"\('channel', 32\)",
        ),
        ("int8, a scale a row", {"ignore": ["lm_head", 1]}, {}, r"ignore \['lm_head', 1\].*a list of module names"),
        ("fp8 in blocks", {"modules_to_not_convert": "a"}, {}, "modules_to_not_convert 'a'.*a list of module names"),
        (
            "packed int4",
            {"config_groups": scheme(num_bits=8, type="float", strategy="channel")},
            {},
            r"\('float', 8\), .*packed int of 4 bits",
        ),
        ("awq", {}, {"qzeros": None}, "lack .*up_proj.qzeros"),
    ],
)
def test_what_is_not_supported_or_contradicts_the_config_is_told(
    tmp_path: Path, kind: str, config: dict[str, Any], tensors: dict[str, Any], told: str
) -> None:
    right_config, store = STORED[kind]
    changed = store(np.random.default_rng(0), N, K).tensors | tensors
    save_file({f"{NAME}.{part}": tensor for part, tensor in changed.items() if tensor is not None}, tmp_path / WEIGHTS)
    with pytest.raises(ModelFolderError, match=told):
        detect_format(right_config | config, Checkpoint(tmp_path)).read(NAME, (N, K))


def test_rows_and_columns_that_cannot_be_packed_are_told(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / WEIGHTS)
    for rows, columns in ((N - 4, K), (N, K - G // 2)):
        with pytest.raises(ModelFolderError, match=f"up_proj of .{rows}, {columns}.: rows by 8, columns by the group"):
            detect_format(GPTQ, Checkpoint(tmp_path)).read(NAME, (rows, columns))
    with pytest.raises(ModelFolderError, match="quant_method None"):
        detect_format("fp8", Checkpoint(tmp_path))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_are_multiplied_without_a_copy_of_w(group: int, has_zeros: bool) -> None:
    weight = quantize(torch.randn(64, 256), "int4", group)
    if has_zeros:
        weight = dataclasses.replace(weight, zeros=torch.randint(16, weight.scales.shape, dtype=torch.uint8))
    for rows, dtype in product((1, 3, 70), (torch.float32, torch.bfloat16)):
        x = torch.randn(rows, 256).to(dtype)
        y = op.linear(x, weight)
        assert y.dtype == dtype
        assert_near(y.float(), x.float() @ dequantize(weight).t(), 0.01)
    assert "cpu_values" in vars(weight)


# Whole models.


def quantizable(checkpoints: dict[str, Path], method: str) -> dict[str, Path]:
    """Of the tiny models only Llama has matrices that groups of INT4 divide."""
    return {"llama": checkpoints["llama"]} if method == "int4" else checkpoints


def test_room_is_asked_for_the_bits_of_rounded_matrices(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("shared.loading.quantized.check_memory", lambda num_bytes, *_: asked.append(num_bytes))
    for method in ("int8", "int4"):
        load_model(tiny_checkpoints["llama"], quantize=quantizer(method))
    plain = load_model(tiny_checkpoints["llama"])
    names = [name for name, module in plain.named_modules() if isinstance(module, Projection) and name != "head"]
    count = sum(plain.get_submodule(name).weight.numel() for name in names)
    assert_equal(asked, [count, count // 2], "bytes", ("method",))


def test_the_command_writes_a_checkpoint_once(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    command = ["model", "quantize", str(tiny_checkpoints["llama"]), str(tmp_path / "int8"), "--method"]
    assert "it must be one of fp8, int8, int4, gptq" in " ".join(
        CliRunner().invoke(app, [*command, "int2"]).output.split()
    )
    result = CliRunner().invoke(app, [*command, "int8"])
    assert result.exit_code == 0, result.output
    assert load_model(tmp_path / "int8", quantize=quantizer()).config.num_layers == 3
    assert "is not empty" in " ".join(CliRunner().invoke(app, [*command, "int8"]).output.split())
    refused = CliRunner().invoke(app, [*command[:3], str(tmp_path / "head"), "--method", "int8", "--quantize-head"])
    assert "leave --quantize-head out" in " ".join(refused.output.split()), "the head is the embedding"
    untied = tmp_path / "untied"
    shutil.copytree(tiny_checkpoints["llama"], untied)  # whose config says that the head is the embedding
    tensors = load_file(untied / "model.safetensors")
    save_file(tensors | {"lm_head.weight": 1 + tensors["model.embed_tokens.weight"]}, untied / "model.safetensors")
    written = quantize_checkpoint(untied, tmp_path / "head", "int8")
    assert not json.loads((written / "config.json").read_text())["tie_word_embeddings"], "as the tensors say"


def test_all_matrices_of_a_checkpoint_have_one_size_of_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 128 alone could have groups of 128, those of 160 not; config.json has one scheme for both."""
    monkeypatch.setitem(SHAPES, "uneven", SHAPES["tiny-llama"] | {"hidden_size": 128, "num_attention_heads": 6})
    written = quantize_checkpoint(make_checkpoint("uneven", tmp_path / "plain"), tmp_path / "int4", "int4")
    model = load_model(written, quantize=quantizer())
    weights = [module.weight for module in model.modules() if isinstance(module, QuantizedProjection)]
    assert {weight.columns_per_scale for weight in weights} == {32}
    assert {weight.shape[1] for weight in weights} == {96, 128, 160}


@pytest.mark.parametrize("method", METHODS)
def test_transformers_reads_a_written_checkpoint(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, method: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    for family, folder in quantizable(tiny_checkpoints, method).items():
        written = quantize_checkpoint(folder, tmp_path / family, method)
        reader = CompressedTensorsConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32, quantization_config=reader)
        with torch.inference_mode():
            wanted = model(torch.arange(3, 40)[None]).logits[0]
        assert_near(logits(plainly(load_model(written, quantize=quantizer()))), wanted, 1e-4)
