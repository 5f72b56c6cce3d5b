"""Products with weights of 8 and 4 bits, with every prologue and epilogue, in every tiling, against fp64."""

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.kernels.arrival import MAX_GROUPS
from shared.kernels.launch import GENERATIONS, INTERPRETED, next_power_of_two
from shared.kernels.products import quantized_gemm, quantized_gemv, quantized_prompts
from shared.kernels.products.fp8_rows import FP8_ROWS, fits, fp8_rows_kernel
from shared.kernels.products.gated import gated_kernel
from shared.kernels.products.quantized_gemm import quantize_rows, quantize_rows_kernel, quantized_gemm_kernel
from shared.kernels.products.quantized_gemv import linear
from shared.kernels.products.quantized_prompts import dequantize_kernel
from shared.kernels.products.quantized_tiling import (
    QuantizedTiling,
    fp8_rows_tiling,
    quantized_tiling,
)
from shared.kernels.products.rmsnorm import rms_norm, rms_norm_kernel
from shared.kernels.products.tiling import MAX_ROWS
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.fused import fuse
from shared.models.parts import MergedGroup
from shared.models.projection import Projection, ProjectionGroup
from shared.models.quantized import FusedQuantizedProjection, QuantizedMLP, QuantizedProjection
from shared.ops.gated import geglu, swiglu
from shared.quantization.weight import QuantizedWeight, dequantize, pack_nibbles
from tests.comparison import assert_equal
from tests.kernels.products import assert_product, norm_of, normed, share_of_terms

FORMATS = ["fp8", "int8", "int4", "int4 with zeros"]
GEMV = QuantizedTiling(8, 128, 4)  # several rows of W a program, several tiles: short in the interpreter
FP8_SUMS = 2.0**-23 if INTERPRETED else 2.0**-11  # error of a sum, over its terms: Hopper's sums of FP8 keep 14 bits
PIPELINED = QuantizedTiling(16, 32, 4, num_stages=2, dot=True)
FEW_ROWS = [  # of quantized_rows_kernel: W's rows, columns and parts
    QuantizedTiling(64, 128, 4, 2, True, 0, 1, 16),
    QuantizedTiling(64, 128, 4, 2, True, 0, 3, 32),
    QuantizedTiling(128, 256, 8, 2, True, 0, 2, 16),
]


@pytest.fixture
def quantized(device: torch.device) -> Callable[..., QuantizedWeight]:
    """``quantized(format, N, K, columns_per_scale=K, rows_per_scale=1, dtype=fp32)``: every number is equally likely,
    and the scales of two groups are different."""
    generator = torch.Generator().manual_seed(1)

    def draw(kind, N, K, columns_per_scale=None, rows_per_scale=1, dtype=torch.float32):
        group = columns_per_scale or K
        groups = -(-N // rows_per_scale), K // group
        scales = (0.5 + torch.rand(groups, generator=generator)).to(dtype)
        zeros = None
        if kind == "fp8":
            numbers = torch.randint(256, (N, K), generator=generator, dtype=torch.uint8)
            numbers[numbers & 127 == 127] = 0  # NaN
            values, scales = numbers.view(torch.float8_e4m3fn), scales / 128
        elif kind == "int8":
            values, scales = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8), scales / 256
        else:
            values, scales = pack_nibbles(torch.randint(16, (N, K), generator=generator), min(group, 128)), scales / 8
            if kind == "int4 with zeros":
                zeros = torch.randint(16, groups, generator=generator, dtype=torch.uint8).to(device)
        return QuantizedWeight(values.to(device), scales.to(device), zeros, group, rows_per_scale)

    return draw


@pytest.fixture
def check(assert_near: Callable) -> Callable[..., None]:
    """``linear`` of the arguments against the formula in fp64.

    The kernel adds up ``x · v`` and ``x · zero``, so these are the terms.
    """

    def run(x, weight, bias=None, norm=None, residual=None, activation=None, **cut: Any) -> None:
        before = None if residual is None else residual.clone()  # it may be overwritten
        if len(x) == 1:
            cut.setdefault("cut", GEMV)
        out = linear(x, weight, bias, norm, residual, activation, **cut)
        h, w, share = normed(x, norm), dequantize(weight).double(), share_of_terms(x.dtype, norm)
        size = w.abs()
        if weight.bits == 4:
            ones = dataclasses.replace(weight, values=torch.full_like(weight.values, 0xFF))
            nothing = dataclasses.replace(weight, values=torch.zeros_like(weight.values))
            size = dequantize(ones).double() - 2 * dequantize(nothing).double()  # (15 - z) s + 2 z s
        is_fp8 = weight.values.dtype == torch.float8_e4m3fn
        least = FP8_ROWS if fits(x, weight) else MAX_ROWS
        if is_fp8 and len(x) > least and quantized_gemv.generation(x.device).has_fp8:
            values, scales = quantize_rows(x, norm)
            h = values.double() * scales.double()[:, None]
            share += FP8_SUMS / torch.finfo(x.dtype).eps
        if len(x) > MAX_ROWS:
            share += 1.0  # product, activation and sum are rounded one after the other
        if len(x) > MAX_ROWS and quantized_prompts.is_faster(len(x), len(weight), x):
            share += 0.5  # and so is a scaled weight
        assert_product(assert_near, out, h, w, size, share, bias, before, activation)

    return run


@pytest.fixture
def as_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 as a GPU of capability 8.9 or later has it; the interpreter is taken for one of 8.0."""
    monkeypatch.setattr(quantized_gemv, "generation", lambda device: GENERATIONS[9, 0])


def fused_product(weight: QuantizedWeight) -> FusedQuantizedProjection:
    """A product with this weight, as a loaded and fused model has it."""
    projection = FusedQuantizedProjection([QuantizedProjection(Projection(1, 1), weight)])
    projection.weight = weight
    return projection


@pytest.mark.parametrize(("rows", "group"), [(1, 32), (1, None), (2, 64), (16, 128), (17, 32), (72, None)])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_with_every_group(kind, group, rows, quantized, randn, check):
    check(randn(rows, 384), quantized(kind, 19, 384, group))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_of_x_and_scales(kind, rows, dtype, quantized, randn, check):
    weight = quantized(kind, 19, 256, 128, dtype=torch.bfloat16 if dtype == torch.float32 else dtype)
    check(randn(rows, 256, dtype=dtype), weight)


@pytest.mark.parametrize("kind", FORMATS)
def test_one_row_of_every_stored_dtype(kind, stored_dtype, quantized, randn, check):
    check(randn(1, 256, dtype=stored_dtype), quantized(kind, 19, 256, 128), norm=norm_of(randn(256), 1.0))


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("rows_per_scale", [128, 200])
@pytest.mark.parametrize("columns_per_scale", [128, None])
def test_blocks_and_a_scale_a_tensor(columns_per_scale, rows_per_scale, rows, quantized, randn, check):
    """The last block has fewer rows, and a gated product's rows meet in different blocks."""
    weight = quantized("fp8", 200, 256, columns_per_scale, rows_per_scale)
    check(randn(rows, 256), weight)
    check(randn(rows, 256), weight, activation=swiglu)


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(
    ("has_bias", "has_norm", "has_residual"),
    [(True, False, False), (False, True, False), (False, False, True), (True, True, True)],
)
def test_every_prologue_with_every_epilogue(has_bias, has_norm, has_residual, rows, quantized, randn, check):
    bias = randn(38) if has_bias else None
    norm = norm_of(randn(128), 1.0) if has_norm else None
    for kind, activation in (("int8", swiglu), ("int4 with zeros", geglu)):
        weight = quantized(kind, 38, 128, 64)
        check(randn(rows, 128), weight, bias, norm, randn(rows, 38) if has_residual else None)
        check(randn(rows, 128), weight, bias, norm, randn(rows, 19) if has_residual else None, activation)


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize(("kind", "N", "K"), [("int8", 1, 1), ("int8", 18, 100), ("fp8", 34, 65), ("int4", 6, 96)])
def test_odd_sizes(kind, N, K, rows, quantized, randn, check):
    check(randn(rows, K), quantized(kind, N, K), norm=norm_of(randn(K), 1.0))
    check(randn(rows, K), quantized(kind, 2 * N, K), residual=randn(rows, N), activation=swiglu)


@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_tiling_gives_the_same(kind, group, quantized, randn, check):
    weight, norm = quantized(kind, 38, 320 if group else 384, group), norm_of(randn(320 if group else 384), 0.0)
    for cut in (QuantizedTiling(4, 512, 4), QuantizedTiling(16, 64, 4)):
        check(randn(1, weight.shape[1]), weight, norm=norm, cut=cut)
        check(randn(1, weight.shape[1]), weight, norm=norm, activation=swiglu, cut=cut)
    for cut in (PIPELINED, dataclasses.replace(PIPELINED, block_k=64, block_m=32)):
        check(randn(21, weight.shape[1]), weight, cut=cut)


@pytest.mark.parametrize(("cut", "group"), zip(FEW_ROWS, (128, None, 128), strict=True))
@pytest.mark.parametrize("kind", FORMATS)
def test_a_few_rows_in_every_tiling(kind, group, cut, quantized, randn, check):
    """A block of W's rows that is not full, scales of several groups, and parts of K that the last program adds up."""
    rows, K = cut.block_m - 5, cut.block_k * max(2, cut.splits)
    weight = quantized(kind, 134, K, group)
    check(randn(rows, K), weight, randn(134), residual=randn(rows, 134), cut=cut)
    check(randn(rows, K), weight, residual=randn(rows, 67), activation=swiglu, cut=cut)


@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize("kind", FORMATS)
def test_prompts_are_multiplied_by_tiles_of_rows(kind, group, quantized, randn, check, num_launches, monkeypatch):
    """Three tiles, the last of which is not full. FP8 is so on a GPU that does not multiply it."""
    monkeypatch.setattr(quantized_gemv, "generation", lambda device: GENERATIONS[8, 0])
    rows, weight = MAX_ROWS + 2, quantized(kind, 38, 128, group)
    monkeypatch.setattr(quantized_prompts, "TILE_ROWS", 16)
    x, residual = randn(rows, 128, dtype=torch.float16), randn(rows, 38, dtype=torch.float16)
    check(x, weight, randn(38, dtype=torch.float16), norm_of(randn(128, dtype=torch.float16), 0.0), residual)
    assert num_launches(dequantize_kernel) == 3
    check(x, weight, residual=residual[:, :19], activation=swiglu)
    assert num_launches(quantized_gemm_kernel) == 0


@pytest.mark.parametrize(
    ("rows", "N", "is_by_tiles"), [(65, 256, True), (65, 257, False), (255, 384, False), (256, 384, True)]
)
def test_tiles_serve_many_rows_and_matrices_that_would_leave_multiprocessors_idle(
    rows, N, is_by_tiles, quantized, randn, num_launches, monkeypatch
):
    """On a GPU of three multiprocessors; a program of the other product has 128 rows of W."""
    monkeypatch.setattr(quantized_prompts, "num_multiprocessors", lambda device: 3)
    linear(randn(rows, 32, dtype=torch.float16), quantized("int8", N, 32))
    assert num_launches(dequantize_kernel) == is_by_tiles
    assert num_launches(quantized_gemm_kernel) == (not is_by_tiles)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_programs_of_prompts_cover_every_block_once(kind, quantized, randn, check):
    """Eighteen blocks of rows are more than a band of programs."""
    check(randn(285, 32), quantized(kind, 37, 32), cut=PIPELINED)


def test_all_numbers_of_fp8_are_widened_exactly(as_ampere_and_hopper, device):
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    is_number = ~numbers.float().isnan()
    numbers = torch.where(is_number, numbers.view(torch.uint8), 0).view(torch.float8_e4m3fn)
    weight = QuantizedWeight(numbers[:, None].repeat(1, 32), torch.ones(256, 1, device=device), None, 32)
    one = torch.zeros(2, 32, device=device)
    one[:, 3] = 1.0
    for rows, cut in ((1, QuantizedTiling(64, 32, 4)), (2, QuantizedTiling(64, 32, 4, dot=True))):
        assert_equal(linear(one[:rows], weight, cut=cut)[0], numbers.float(), "all numbers of FP8", ("number",))


@pytest.fixture(params=["Ampere", "Hopper"])
def as_ampere_and_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    gpu = GENERATIONS[8, 0] if request.param == "Ampere" else GENERATIONS[9, 0]
    monkeypatch.setattr(quantized_gemv, "generation", lambda device: gpu)
    return request.param


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns_per_scale", [128, None])
def test_fp8_is_converted_where_the_gpu_can(columns_per_scale, rows, as_hopper, quantized, randn, check):
    weight = quantized("fp8", 38, 256, columns_per_scale)
    check(randn(rows, 256), weight, norm=norm_of(randn(256), 0.0), activation=swiglu)


def test_rows_in_fp8(as_hopper, device, randn):
    x = randn(20, 300, dtype=torch.float16)[:, 50:250]
    x[3] = 0
    values, scales = quantize_rows(x)
    peaks = x.float().abs().amax(1).cpu()  # on a GPU PyTorch multiplies by 1 / 448
    expected = (peaks / 448).where(peaks > 0, 1.0).to(device)
    assert_equal(scales, expected, "scales", ("row",))
    exact = x.float() / expected[:, None]
    numbers, rounded = values.float(), exact.to(values.dtype).float()
    if INTERPRETED:  # it rounds ties up, and does not carry into the exponent when it rounds up to a power of two
        is_tie = (numbers - exact).abs() == (rounded - exact).abs()
        numbers = rounded.where(is_tie | (rounded.frexp().mantissa.abs() == 0.5), numbers)
    assert_equal(numbers, rounded, "numbers", ("row", "column"))


@pytest.mark.parametrize("gated", [None, swiglu])
def test_the_tiles_of_a_long_row_share_its_scale(gated, as_hopper, randn, monkeypatch):
    """As if the row were one tile: its largest number is in any of them."""
    columns = 3 * quantized_gemm.ROUNDED_TILE
    x = randn(3, columns * (1 if gated is None else 2), dtype=torch.float16)
    for row in range(3):
        x[row, row * quantized_gemm.ROUNDED_TILE + 7] = 60
    in_tiles = quantize_rows(x, None, gated)
    monkeypatch.setattr(quantized_gemm, "ROUNDED_TILE", 2 * columns)
    for tiled, whole in zip(in_tiles, quantize_rows(x, None, gated), strict=True):
        assert torch.equal(tiled.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rows_of_a_norm_in_fp8_are_those_of_the_norm_as_it_is_written(offset, as_hopper, randn):
    """Up to how a GPU adds up the squares: a few numbers may be neighbours in FP8."""
    x, norm = randn(20, 300, dtype=torch.float16)[:, 50:250], norm_of(randn(200, dtype=torch.float16), offset)
    values, scales = quantize_rows(x, norm)
    expected, of_rows = quantize_rows(rms_norm(x, norm.weight, norm.eps, norm.offset))
    torch.testing.assert_close(scales, of_rows, rtol=2**-10, atol=0)
    torch.testing.assert_close(values.float(), expected.float(), rtol=2**-3, atol=2**-9)
    assert (values.float() != expected.float()).float().mean() < 0.02


@pytest.mark.parametrize("activation", [swiglu, geglu])
@pytest.mark.parametrize("columns_per_scale", [128, None])
@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 8])
def test_the_mlp_of_a_prompt_activates_and_rounds_in_one_launch(
    rows, columns_per_scale, activation, as_hopper, quantized, randn, num_launches
):
    """It gives what the product, the activation and the second product give one after the other."""
    gate_up, down = quantized("fp8", 512, 128), quantized("fp8", 64, 256, columns_per_scale)
    gate_up = dataclasses.replace(gate_up, scales=gate_up.scales / 64)
    mlp = QuantizedMLP(SimpleNamespace(gate_up=None, down_proj=None, gated=activation))
    mlp.down_proj = fused_product(down)
    mlp.gate_up = MergedGroup(
        ProjectionGroup(gate=Projection(1, 256), up=Projection(1, 256)), lambda _: fused_product(gate_up)
    )
    x, residual = randn(rows, 128, dtype=torch.float16), randn(rows, 64, dtype=torch.float16)
    expected = linear(linear(x, gate_up, activation=activation), down, residual=residual.clone())
    before = num_launches(gated_kernel), num_launches(quantize_rows_kernel)
    out = mlp(x, SimpleNamespace(gate=None), residual=residual)
    assert_equal(out, expected, "outputs", ("row", "column"))
    assert num_launches(gated_kernel) == before[0] == (rows > MAX_ROWS)
    assert num_launches(quantize_rows_kernel) == 2 * before[1] == 4


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_loaded_and_fused_model_has_such_an_mlp(family, as_hopper, tiny_checkpoints, device, randn, num_launches):
    model = load_model(tiny_checkpoints[family], dtype=torch.float16, device=device, quantize=quantizer("fp8"))
    fuse(model)
    mlp = model.blocks[0].mlp
    mlp(randn(MAX_ROWS + 8, model.config.hidden_size, dtype=torch.float16), SimpleNamespace(gate=None))
    assert (num_launches(gated_kernel), num_launches(quantize_rows_kernel)) == (0, 2)


@pytest.mark.parametrize("columns_per_scale", [128, None])
@pytest.mark.parametrize("activation", [None, swiglu])
def test_prompts_are_multiplied_in_fp8(activation, columns_per_scale, as_hopper, quantized, randn, check, num_launches):
    """Against fp64 of x as it is rounded to FP8, which the check does once more."""
    rows, columns = MAX_ROWS + 8, 64 if activation is None else 32
    weight = quantized("fp8", 64, 256, columns_per_scale)
    norm = norm_of(1 + randn(256) / 8, 0.0)
    check(randn(rows, 256), weight, norm=norm, residual=randn(rows, columns), activation=activation)
    assert num_launches(quantize_rows_kernel) == 2
    assert num_launches(quantized_gemm_kernel) == 1
    assert num_launches(rms_norm_kernel) == 0


@pytest.mark.parametrize("rows", [8, 9, 40, MAX_ROWS])
@pytest.mark.parametrize(("columns_per_scale", "rows_per_scale"), [(None, 1), (None, 200), (128, 128), (128, 1)])
def test_more_rows_than_one_request_verifies_are_rounded_to_fp8(
    columns_per_scale, rows_per_scale, rows, as_hopper, quantized, randn, check, num_launches
):
    """Several parts of K, blocks of W's rows that are not full, and with up to eight rows nothing is rounded."""
    weight, half = quantized("fp8", 200, 512, columns_per_scale, rows_per_scale), torch.float16
    norm, bias = norm_of(1 + randn(512, dtype=half) / 8, 0.0), randn(200, dtype=half)
    check(randn(rows, 512, dtype=half), weight, bias, norm, randn(rows, 200, dtype=half), cut=None)
    parts = QuantizedTiling(64, 128, 4, 2, True, 4, 2, max(16, next_power_of_two(rows)))
    check(randn(rows, 512, dtype=half), weight, residual=randn(rows, 100, dtype=half), activation=swiglu, cut=parts)
    assert num_launches(fp8_rows_kernel) == num_launches(quantize_rows_kernel) / 2 == 2 * (rows > 8)


@pytest.mark.parametrize("rows", [MAX_ROWS + 8])
@pytest.mark.parametrize("rows_per_scale", [1, 64])
def test_many_rows_in_bf16_with_scales_of_rows_are_pytorchs(
    rows_per_scale, rows, as_hopper, quantized, randn, num_launches
):
    weight, x = quantized("fp8", 64, 256, None, rows_per_scale), randn(rows, 256, dtype=torch.bfloat16)
    residual, bias = randn(rows, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    values, scales = quantize_rows(x)
    h, w = values.double() * scales.double()[:, None], dequantize(weight).double()
    expected = h @ w.t() + residual.double() + bias.double()
    out = linear(x, weight, bias, residual=residual.clone())
    assert ((out.double() - expected).abs() <= 2**-7 * (h.abs() @ w.abs().t())).all()
    assert num_launches(quantized_gemm_kernel) == 0


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 15, 16])
def test_few_rows_take_one_launch_and_several_rows_one_more_for_a_norm(rows, quantized, randn, check, num_launches):
    norm = norm_of(randn(64), 0.0)
    for launched, kind in enumerate(("int8", "int4"), 1):
        check(randn(rows, 64), quantized(kind, 6, 64, 64), None, norm, None, swiglu, cut=None)
        assert num_launches(quantized_gemm_kernel) == launched * (rows > 1)
        assert num_launches(rms_norm_kernel) == launched * (rows > 1)
        assert num_launches() == launched * (1 + (rows > 1))


def test_a_prompt_takes_a_launch_for_norm_product_and_activation(quantized, randn, check, num_launches):
    rows = MAX_ROWS + 8
    check(randn(rows, 48), quantized("int8", 6, 48), None, norm_of(randn(48), 0.0), randn(rows, 3), swiglu)
    kernels = (rms_norm_kernel, quantized_gemm_kernel, gated_kernel)
    assert [num_launches(kernel) for kernel in kernels] == [1, 1, 1]
    assert num_launches() == 3


def test_a_row_is_the_same_in_any_company(quantized, randn, assert_same_rows):
    x, residual, norm = randn(16, 128), randn(16, 38), norm_of(randn(128), 0.0)
    weight = quantized("int4", 38, 128, 64)
    together = linear(x, weight, norm=norm, residual=residual.clone())
    for rows in (slice(0, 2), slice(5, 8), slice(3, 16)):
        assert_same_rows(linear(x[rows], weight, norm=norm, residual=residual[rows].clone()), together[rows])


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_rows_and_columns_may_lie_apart(rows, quantized, randn, check):
    weight, wide = quantized("int8", 8, 64), randn(rows, 200)
    check(wide[:, 100:164], weight, residual=randn(rows, 60)[:, 30:38])
    check(randn(64, rows).t(), weight, residual=randn(8, rows).t())


def test_no_rows_give_no_rows_and_nothing_is_launched(quantized, randn, num_launches):
    assert linear(randn(0, 32), quantized("int8", 20, 32), residual=randn(0, 20)).shape == (0, 20)
    assert linear(randn(0, 32), quantized("int8", 20, 32), activation=swiglu).shape == (0, 10)
    assert num_launches() == 0


def test_what_the_kernels_cannot_read_is_refused(quantized, randn):
    weight = quantized("int8", 20, 96, 32)
    for wrong, message in (
        (quantized("int8", 20, 100), r"contiguous \[N, 96\]"),
        (dataclasses.replace(weight, columns_per_scale=48), "not to 48"),
        (dataclasses.replace(weight, columns_per_scale=64), "not to 64"),
        (dataclasses.replace(weight, rows_per_scale=4), r"\(5, 3\) scales"),
        (dataclasses.replace(weight, zeros=weight.scales[:, :2].to(torch.uint8)), "as many zeros"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(randn(1, 96), wrong)
    row_wise = quantized("int4", 20, 128)
    wide = dataclasses.replace(
        row_wise, values=row_wise.values.repeat(1, 3)[:, :96].contiguous(), columns_per_scale=192
    )
    with pytest.raises(ValueError, match="packed by 128 columns, and 192"):
        linear(randn(1, 192), wide)
    for rows, cut in (
        (2, QuantizedTiling(8, 64, 4)),
        (2, dataclasses.replace(PIPELINED, block_k=64)),
        (17, FEW_ROWS[0]),
    ):
        with pytest.raises(ValueError, match=r"[tT]iling"):
            linear(randn(rows, 96), weight, cut=cut)
    with pytest.raises(ValueError, match="at most 32 tiles, and 2080 columns are more of 64"):
        linear(randn(1, 2080), quantized("int8", 4, 2080), cut=QuantizedTiling(8, 64, 4))


def test_the_table_keeps_its_rules():
    sizes = (1, 72, 96, 576, 1024, 4096, 9728, 151936)
    gpus = set(GENERATIONS.values())
    for rows, N, K in itertools.product((1, 2, 16, 17, 64, 100, 2048), sizes, sizes[:-1]):
        for bits, group, is_gated, itemsize, gpu in itertools.product(
            (8, 4), (32, 128, K), (False, True), (2, 4), gpus
        ):
            if K % group:
                continue
            cut = quantized_tiling(rows, N, K, bits, group, is_gated, itemsize, gpu.shared_bytes)
            message = f"{rows, N, K, bits, group, is_gated, itemsize, gpu.shared_bytes} {cut}"
            sizes_of_block = (cut.block_m, cut.block_n, cut.block_k)
            assert all(size == next_power_of_two(size) for size in sizes_of_block), message
            assert cut.block_k * bits // 8 >= 16, message
            assert cut.dot == (rows > 1), message
            if not cut.dot:
                assert quantized_gemv.MOST_TILES * cut.block_k >= K, message
            else:
                of_w = cut.block_n * (2 if is_gated else 1) * cut.block_k * bits // 8
                stage = of_w + cut.block_m * cut.block_k * itemsize
                assert cut.num_stages * stage <= gpu.shared_bytes, message
                assert cut.num_stages >= 2, message
                assert min(cut.block_m, cut.block_n) >= 16, message
                assert cut.block_k <= group or group == K or cut.splits, message
                if cut.splits:
                    assert (itemsize, group in (128, K), K % (cut.splits * cut.block_k)) == (2, True, 0), message
                    assert cut.splits == 1 or -(-N // cut.block_n) <= MAX_GROUPS, message


def test_the_table_of_fp8_keeps_its_rules():
    sizes = (1, 128, 576, 1024, 3072, 4096, 9728, 12288, 151936)
    gpus = {gpu for gpu in GENERATIONS.values() if gpu.has_fp8}
    for rows, N, K, is_gated, gpu in itertools.product((9, 16, 17, 64), sizes, sizes, (False, True), gpus):
        for group in (128, K):
            if K % 128:
                continue
            cut = fp8_rows_tiling(rows, N, K, group, is_gated, gpu.shared_bytes)
            stage = cut.block_k * ((2 if is_gated else 1) * cut.block_n + cut.block_m)
            message = f"{rows, N, K, group, is_gated, gpu.shared_bytes} {cut}"
            assert rows <= cut.block_m == next_power_of_two(cut.block_m), message
            assert 2 <= cut.num_stages <= gpu.shared_bytes // stage, message
            assert (K % (cut.splits * cut.block_k), cut.block_k <= group) == (0, True), message
            assert cut.splits == 1 or -(-N // cut.block_n) <= MAX_GROUPS, message


REAL = [  # each number of rows in the dtype that models have; the others where their tilings differ
    *((torch.bfloat16, rows, group) for rows in (1, 2, 16, 17, 64, 128, 300, 1024) for group in (128, None)),
    *((torch.float16, rows, group) for rows, group in ((1, 128), (17, None), (300, 128))),
    *((torch.float32, rows, group) for rows, group in ((1, None), (2, 128), (16, None), (300, 128))),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "rows", "group"), REAL, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("kind", FORMATS)
def test_real_shapes(kind, group, rows, dtype, quantized, randn, check):
    if kind == "fp8" and rows > MAX_ROWS:
        pytest.skip("test_prompts_are_multiplied_in_fp8, and where PyTorch multiplies its sums keep 14 bits")
    for N, K in ((6144, 4096), (4096, 12288)):
        weight = quantized(kind, N, K, group, dtype=torch.float32)
        weight = dataclasses.replace(weight, scales=weight.scales / 16)  # fp16 ends at 65,504
        norm = norm_of(randn(K, dtype=dtype), 0.0)
        check(randn(rows, K, dtype=dtype), weight, norm=norm, activation=swiglu, cut=None)  # the table's tiling
        check(randn(rows, K, dtype=dtype), weight, residual=randn(rows, N, dtype=dtype), cut=None)
