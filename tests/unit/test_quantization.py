"""Weights of 8 and 4 bits: rounding, the formats of checkpoints, and models that load with them.

The reference for a stored format packs its numbers one by one, as the format's publication says; the whole checkpoint
is compared with what transformers reads where compressed-tensors is installed.
"""

import dataclasses
import json
import shutil
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

N, K, G = 48, 256, 128
NAME = "model.layers.0.mlp.up_proj"


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


@pytest.mark.parametrize(("method", "step"), [("fp8", 2**-4), ("int8", 0.5 / 127), ("int4", 0.5 / 7.5)])
def test_rounding_is_as_near_as_the_format_allows(method: str, step: float) -> None:
    weight = torch.randn(N, K) * torch.logspace(-3, 3, N)[:, None]
    weight[5] = 0
    rounded = quantize(weight, method)
    error = (dequantize(rounded) - weight).abs()
    if method == "fp8":  # three bits of mantissa, down to the smallest normal number
        assert (error <= weight.abs() * step + weight.abs().amax(1, keepdim=True) * 2**-17).all()
    else:
        of_group = weight.unflatten(1, (-1, rounded.columns_per_scale)).abs().amax(2)
        worst = step if method == "int8" else 2 * step  # 4 bits reach 7 above and 8 below
        assert (error <= of_group.repeat_interleave(rounded.columns_per_scale, 1) * worst * 1.001).all()
    assert torch.equal(dequantize(rounded)[5], weight[5])


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


@pytest.mark.parametrize("rows", [(256, 128), (200, 56, 130)])
def test_blocks_of_merged_matrices_keep_their_scales(rows: tuple[int, ...]) -> None:
    weights = [
        QuantizedWeight(torch.randn(n, K).to(torch.float8_e4m3fn), torch.rand(-(-n // 128), 2), None, 128, 128)
        for n in rows
    ]
    merged = concatenate(weights)
    assert torch.equal(dequantize(merged), torch.cat([dequantize(weight) for weight in weights]))
    assert merged.rows_per_scale == (128 if rows == (256, 128) else 1)


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


# Formats.


def packed_one_by_one(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers ``[.., 8n]`` as int32 ``[.., n]``: number ``order[i]`` of eight goes to bits 4i to 4i + 3."""
    out = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.uint32)
    for i, column in enumerate(order):
        out |= numbers[..., column::8].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(out.view(np.int32))


GENERATOR = np.random.default_rng(0)
NUMBERS = GENERATOR.integers(0, 16, (N, K))
ZEROS = GENERATOR.integers(0, 16, (N, K // G))
SCALES = torch.from_numpy(GENERATOR.random((N, K // G), np.float32)) + 0.1
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of AutoAWQ's gemm kernel
BLOCK_SCALES = torch.from_numpy(GENERATOR.random((1, 2), np.float32)) + 0.1
EIGHT_BITS = torch.from_numpy(GENERATOR.integers(-127, 128, (N, K))).to(torch.int8)
FLOATS = torch.from_numpy(GENERATOR.standard_normal((N, K), np.float32)).to(torch.float8_e4m3fn)


def packed_columns(numbers: np.ndarray) -> torch.Tensor:
    return packed_one_by_one(numbers).T.contiguous()


def in_groups(zeros: Any) -> torch.Tensor:
    spread = torch.as_tensor(np.broadcast_to(zeros, (N, K // G)).copy()).repeat_interleave(G, 1)
    return (torch.from_numpy(NUMBERS) - spread) * SCALES.repeat_interleave(G, 1)


def scheme(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G, "desc_act": False, "damp_percent": 0.01, "dynamic": None}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": G,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}
PACKED = scheme(num_bits=4, type="int", strategy="group", group_size=G, symmetric=True)
ASYMMETRIC = scheme(num_bits=4, type="int", strategy="group", group_size=G, symmetric=False)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
CT = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*layers[.]7[.].*"], "transform_config": {}}
CT |= {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}, "quantization_status": "compressed"}
INT8 = CT | {"format": "int-quantized", "config_groups": scheme(num_bits=8, type="int", strategy="channel")}
GPTQ_TENSORS = {
    "qweight": packed_columns(NUMBERS),
    "qzeros": packed_one_by_one((ZEROS.T - 1) % 16),
    "scales": SCALES.T.contiguous(),
    "g_idx": (torch.arange(K) // G).int(),
}
STORED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]] = {
    "fp8 in blocks": (
        BLOCKS,
        {"weight": FLOATS, "weight_scale_inv": BLOCK_SCALES},
        FLOATS.float() * BLOCK_SCALES.repeat_interleave(128, 1),
    ),
    "fp8, a scale a tensor": (
        CT | {"format": "float-quantized", "config_groups": scheme(num_bits=8, type="float", strategy="tensor")},
        {"weight": FLOATS, "weight_scale": torch.tensor([0.5])},
        FLOATS.float() * 0.5,
    ),
    "int8, a scale a row": (
        INT8,
        {"weight": EIGHT_BITS, "weight_scale": SCALES[:, :1].bfloat16()},
        EIGHT_BITS * SCALES[:, :1].bfloat16().float(),
    ),
    "packed int4": (
        CT | {"format": "pack-quantized", "config_groups": PACKED},
        {"weight_packed": packed_one_by_one(NUMBERS), "weight_scale": SCALES, "weight_shape": torch.tensor([N, K])},
        in_groups(8),
    ),
    "packed int4 with zeros": (
        CT | {"format": "pack-quantized", "config_groups": ASYMMETRIC},
        {
            "weight_packed": packed_one_by_one(NUMBERS),
            "weight_scale": SCALES,
            "weight_zero_point": packed_one_by_one(ZEROS.T).T.contiguous(),
        },
        in_groups(ZEROS),
    ),
    "gptq": (GPTQ | {"checkpoint_format": "GPTQ", "format": "gptq"}, GPTQ_TENSORS, in_groups(ZEROS)),
    "gptq, version 2, symmetric": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        {
            "qweight": packed_columns(NUMBERS),
            "qzeros": packed_one_by_one(np.full((K // G, N), 8)),
            "scales": SCALES.T.contiguous(),
        },
        in_groups(8),
    ),
    "awq": (
        AWQ,
        {
            "qweight": packed_one_by_one(NUMBERS.T, AWQ_ORDER),
            "qzeros": packed_one_by_one(ZEROS.T, AWQ_ORDER),
            "scales": SCALES.T.contiguous(),
        },
        in_groups(ZEROS),
    ),
    "awq without zeros": (
        AWQ | {"zero_point": False},
        {"qweight": packed_one_by_one(NUMBERS.T, AWQ_ORDER), "scales": SCALES.T.contiguous()},
        in_groups(8),
    ),
}


def read(folder: Path, config: Any, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
    save_file({f"{NAME}.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    return detect_format(config, Checkpoint(folder)).read(NAME, (N, K))


@pytest.mark.parametrize("kind", STORED)
def test_a_stored_matrix_is_read(tmp_path: Path, kind: str) -> None:
    config, tensors, wanted = STORED[kind]
    weight = read(tmp_path, config, tensors)
    torch.testing.assert_close(dequantize(weight).double(), wanted.double())
    assert weight.scales.shape == (-(-N // weight.rows_per_scale), K // weight.columns_per_scale)
    assert (weight.zeros is not None) == (kind in ("packed int4 with zeros", "gptq", "awq")), "zeros of 8 are left out"


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
        ("gptq", {}, {"g_idx": torch.arange(K).int() % 2}, r"up_proj\.g_idx.*act-order"),
        ("awq", {"version": "gemv"}, {}, "version 'gemv'.*'gemm'"),
        ("fp8 in blocks", {"weight_block_size": [64, 64]}, {}, r"weight_block_size \[64, 64\]"),
        ("fp8 in blocks", {"fmt": "e4m3fnuz"}, {}, "fmt 'e4m3fnuz'.*'e4m3'"),
        ("fp8 in blocks", {}, {"weight": FLOATS.float()}, r"up_proj\.weight.*float32.*must be float8_e4m3fn"),
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
    right_config, right_tensors, _ = STORED[kind]
    changed = {name: tensor for name, tensor in (right_tensors | tensors).items() if tensor is not None}
    with pytest.raises(ModelFolderError, match=told):
        read(tmp_path, right_config | config, changed)


def test_rows_that_do_not_fill_an_int32(tmp_path: Path) -> None:
    """Of eight bits in six columns, and zeros of four bits of twelve rows."""
    bytes_ = GENERATOR.integers(0, 256, (3, 8), np.uint8)
    bytes_[:, 6:] = 77
    save_file(
        {
            "a.weight_packed": torch.from_numpy(bytes_.view(np.int32)),
            "a.weight_scale": torch.tensor(0.5),
            "b.weight_packed": packed_one_by_one(NUMBERS[:12, :G]),
            "b.weight_scale": SCALES[:12, :1].clone(),
            "b.weight_zero_point": packed_one_by_one(np.append(ZEROS[:12, :1].T, [[9] * 4], 1)).T.contiguous(),
        },
        tmp_path / "model.safetensors",
    )
    for config, name, expected in (
        (scheme(num_bits=8, type="int", strategy="tensor"), "a", 0.5 * (torch.from_numpy(bytes_[:, :6]).float() - 128)),
        (ASYMMETRIC, "b", in_groups(ZEROS)[:12, :G]),
    ):
        options = {"format": "pack-quantized", "config_groups": config}
        weight = detect_format(CT | options, Checkpoint(tmp_path)).read(name, tuple(expected.shape))
        torch.testing.assert_close(dequantize(weight), expected.float())
        assert weight.zeros is None or weight.zeros.shape == weight.scales.shape


def test_modules_left_out(tmp_path: Path) -> None:
    """Layer 7 is not layer 70. A pattern begins where a name does; the list of AWQ has parts of names."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(ModelFolderError, match="quant_method None"):
        detect_format("fp8", checkpoint)
    for rows, columns in ((N - 4, K), (N, K - G // 2)):
        with pytest.raises(ModelFolderError, match=f"up_proj of .{rows}, {columns}.: rows by 8, columns by the group"):
            detect_format(GPTQ, checkpoint).read(NAME, (rows, columns))
    in_layer_7 = "model.layers.7.mlp.up_proj"
    for config, left_out in [
        (INT8, in_layer_7),
        (INT8 | {"ignore": ["lm_head", "model.layers.7", in_layer_7, "re:layers[.]70[.]", "re:q_proj"]}, in_layer_7),
        (AWQ | {"modules_to_not_convert": ["layers.7."]}, in_layer_7),
        *((BLOCKS | {"modules_to_not_convert": [name]}, in_layer_7) for name in ("model.layers.7", in_layer_7)),
        (GPTQ, "lm_head"),
    ]:
        stored = detect_format(config, checkpoint)
        assert not stored.quantizes(left_out)
        assert not stored.quantizes("lm_head")
        assert stored.quantizes("model.layers.70.self_attn.q_proj")
    save_file({"lm_head.weight_scale_inv": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert detect_format(BLOCKS, Checkpoint(tmp_path)).quantizes("lm_head"), "a head that has scales"


def test_a_group_that_names_a_module_comes_before_one_for_all(tmp_path: Path) -> None:
    groups = scheme(num_bits=8, type="int", strategy="channel")
    groups["group_1"] = groups["group_0"] | {"targets": [NAME], "format": "float-quantized"}
    groups["group_1"]["weights"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    _, tensors, wanted = STORED["fp8, a scale a tensor"]
    torch.testing.assert_close(dequantize(read(tmp_path, INT8 | {"config_groups": groups}, tensors)), wanted)


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


def test_the_command_writes_a_checkpoint_once(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    command = ["model", "quantize", str(tiny_checkpoints["llama"]), str(tmp_path / "int8"), "--method"]
    assert "it must be one of fp8, int8, int4, gptq" in " ".join(
        CliRunner().invoke(app, [*command, "int2"]).output.split()
    )
    result = CliRunner().invoke(app, [*command, "int8"])
    assert result.exit_code == 0, result.output
    assert load_model(tmp_path / "int8", quantize=quantizer()).config.num_layers == 3
    assert "is not empty" in " ".join(CliRunner().invoke(app, [*command, "int8"]).output.split())
    with pytest.raises(ConfigError, match="leave --quantize-head out"):
        quantize_checkpoint(tiny_checkpoints["llama"], tmp_path / "head", "int8", quantize_head=True)
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
