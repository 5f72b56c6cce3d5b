"""Products of few rows, with every prologue and epilogue, in every tiling, against fp64."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.kernels.arrival import MAX_GROUPS
from shared.kernels.launch import GENERATIONS, next_power_of_two
from shared.kernels.products.gemv import gemv_kernel, linear, skinny_kernel
from shared.kernels.products.rmsnorm import rms_norm, rms_norm_kernel
from shared.kernels.products.tiling import MAX_FP32_ROWS, MAX_ROWS, Tiling, dot_rows, tiling
from shared.ops.gated import geglu, swiglu
from tests.comparison import assert_equal
from tests.kernels.products import assert_product, norm_of, normed, share_of_terms

GEMV = Tiling(8, 64, 4)  # several rows of W a program, several tiles: short in the interpreter
SKINNY = Tiling(16, 32, 4, num_stages=2, dot=True)
CUTS = pytest.mark.parametrize("cut", [GEMV, SKINNY], ids=["gemv", "skinny"])


@pytest.fixture
def check(assert_near: Callable) -> Callable[..., None]:
    """``linear`` of the arguments against the formula in fp64."""

    def run(x, weight, bias=None, norm=None, residual=None, activation=None, **cut: Any) -> None:
        before = None if residual is None else residual.clone()  # it may be overwritten
        out = linear(x, weight, bias, norm, residual, activation, **cut)
        share = share_of_terms(x.dtype, norm)
        if len(x) > most_rows(x.dtype):
            share += 1.0  # product, activation and sum are rounded one after the other
        w = weight.double()
        assert_product(assert_near, out, normed(x, norm), w, w.abs(), share, bias, before, activation)

    return run


@pytest.mark.parametrize(("rows", "K"), [(1, 64), (1, 128), (1, 100), (2, 129)])
def test_one_tile_and_several(rows, K, randn, check, num_launches):
    check(randn(rows, K), randn(19, K, scale=0.1), cut=GEMV)
    assert_equal((num_launches(gemv_kernel), num_launches()), (1, 1), "launches of the kernel, and in all")


@pytest.mark.parametrize("K", [64, 100, 200])
def test_every_tile_is_normed(K, randn, check):
    check(randn(2, K, scale=5), randn(19, K, scale=0.1), norm=norm_of(randn(K), 1.0), cut=GEMV)


@pytest.mark.parametrize("K", [64, 100])
def test_gate_and_up_in_one_pass(K, randn, check):
    check(randn(2, K), randn(2 * 19, K, scale=0.1), None, norm_of(randn(K), 0.0), activation=swiglu, cut=GEMV)


def test_sixteen_bits_are_widened_before_they_are_multiplied_and_summed(device):
    """300 squared is more than fp16 can hold, and 4096 with 1/64 added is 4096 there; in fp32 all of it is exact."""
    x = torch.ones(1, 128, dtype=torch.float16, device=device)
    weight = torch.full((8, 128), 1 / 64, dtype=torch.float16)  # written on the host: a kernel need not wait for it
    weight[:, 0], weight[:, 127] = 4096, -4096
    expected = torch.full((1, 8), 126 / 64, dtype=torch.float64, device=device)
    out = linear(x, weight.to(device), cut=GEMV).double()
    assert_equal(out, expected, "4096 - 4096 + 126 / 64", ("row", "column"))
    x[0, 3] = x[0, 70] = weight[:, 3] = 300
    weight[:, 70] = -300
    out = linear(x, weight.to(device), cut=GEMV).double()
    assert_equal(out, expected - 2 / 64, "300² - 300² + 124 / 64", ("row", "column"))


@CUTS
@pytest.mark.parametrize(
    ("has_bias", "has_norm", "has_residual"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True), (True, True, True)],
)
def test_every_prologue_with_every_epilogue(has_bias, has_norm, has_residual, cut, dtype, randn, check):
    x, weight = randn(2, 100, dtype=dtype), randn(19, 100, dtype=dtype, scale=0.1)
    bias = randn(19, dtype=dtype) if has_bias else None
    norm = norm_of(randn(100, dtype=dtype), 1.0) if has_norm else None
    residual = randn(2, 19, dtype=dtype) if has_residual else None
    check(x, weight, bias, norm, residual, cut=cut)


@CUTS
@pytest.mark.parametrize("parts", [(False, False, False), (False, True, False), (True, True, True)], ids=str)
@pytest.mark.parametrize("activation", [swiglu, geglu])
def test_the_gated_activation_as_epilogue(activation, parts, cut, dtype, randn, check):
    has_bias, has_norm, has_residual = parts
    x, weight = randn(2, 100, dtype=dtype), randn(2 * 19, 100, dtype=dtype, scale=0.1)
    bias = randn(2 * 19, dtype=dtype) if has_bias else None
    norm = norm_of(randn(100, dtype=dtype), 0.0) if has_norm else None
    residual = randn(2, 19, dtype=dtype) if has_residual else None
    check(x, weight, bias, norm, residual, activation, cut=cut)


def most_rows(dtype: torch.dtype) -> int:
    return MAX_FP32_ROWS if dtype == torch.float32 else MAX_ROWS


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
def test_few_rows_take_one_launch_and_several_rows_one_more_for_a_norm(rows, dtype, randn, check, num_launches):
    if rows > most_rows(dtype):
        pytest.skip("PyTorch computes it")
    x, weight = randn(rows, 48, dtype=dtype), randn(6, 48, dtype=dtype)
    norm, residual = norm_of(randn(48, dtype=dtype), 0.0), randn(rows, 6, dtype=dtype)
    for count, of_norm, activation in ((1, None, None), (2, norm, None), (3, norm, swiglu)):
        check(x, weight, None, of_norm, residual if activation is None else None, activation)
        assert num_launches(gemv_kernel) + num_launches(skinny_kernel) == count
        assert num_launches(rms_norm_kernel) == num_launches() - count == (count - 1) * (rows > 1)


def test_a_row_is_the_same_in_any_company(dtype, randn, assert_same_rows):
    x, weight, norm = randn(16, 100, dtype=dtype), randn(38, 100, dtype=dtype), norm_of(randn(100, dtype=dtype), 0.0)
    residual = randn(16, 38, dtype=dtype)
    together = linear(x, weight, norm=norm, residual=residual.clone())
    gated = linear(x, weight, norm=norm, activation=swiglu)
    for rows in (slice(0, 2), slice(5, 8), slice(3, 16)):
        assert_same_rows(linear(x[rows], weight, norm=norm, residual=residual[rows].clone()), together[rows])
        assert_same_rows(linear(x[rows], weight, norm=norm, activation=swiglu), gated[rows])


@pytest.mark.parametrize("more", [1, 24])
def test_above_the_limit_the_product_is_pytorchs(more, dtype, randn, check, num_launches):
    rows = most_rows(dtype) + more
    x, weight = randn(rows, 48, dtype=dtype), randn(26, 48, dtype=dtype)
    norm, residual = norm_of(randn(48, dtype=dtype), 0.0), randn(rows, 26, dtype=dtype)
    check(x, weight, randn(26, dtype=dtype), norm, residual)
    check(x, weight, None, None, residual)
    check(x, weight, None, norm, None, geglu)
    assert num_launches(gemv_kernel) + num_launches(skinny_kernel) == 0
    assert num_launches() == 3  # two norms, an activation


@pytest.mark.parametrize("cut", [Tiling(4, 16, 4), Tiling(2, 128, 4), Tiling(16, 16, 4, dot=True)], ids=str)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (1, 129), (3, 16), (5, 17), (18, 5)])
def test_odd_sizes(N, K, cut, dtype, randn, check):
    x, weight, norm = randn(1, K, dtype=dtype), randn(2 * N, K, dtype=dtype), norm_of(randn(K, dtype=dtype), 1.0)
    check(x, weight[:N], norm=norm, cut=cut)
    check(x, weight, norm=norm, activation=swiglu, cut=cut)


@pytest.mark.parametrize("rows", [1, 3, 9, 20])
def test_rows_and_columns_may_lie_apart(rows, dtype, randn, check):
    weight, norm = randn(8, 64, dtype=dtype), norm_of(randn(64, dtype=dtype), 0.0)
    wide, columns = randn(rows, 200, dtype=dtype), randn(64, rows, dtype=dtype).t()
    residual, across = randn(rows, 60, dtype=dtype)[:, 30:38], randn(8, rows, dtype=dtype).t()
    check(wide[:, 100:164], weight, norm=norm, residual=residual)
    check(randn(3 * rows, 64, dtype=dtype)[::3], weight, norm=norm, residual=across)
    check(columns, weight, norm=norm)
    check(wide[:1, 7:71].expand(rows, 64), weight, residual=residual)


@CUTS
def test_large_and_small_magnitudes(cut, dtype, randn, check):
    x, weight = randn(4, 96, dtype=dtype), randn(16, 96, dtype=dtype, scale=1e-3)
    x[0] *= 1e4
    x[1] *= 1e-3
    x[2] = 0
    x[3, 5] = 6e4
    check(x, weight, cut=cut)
    check(x, weight, norm=norm_of(randn(96, dtype=dtype, scale=20), 1.0), cut=cut)


@CUTS
def test_the_normed_x_is_rounded_before_the_product(cut, randn):
    """Differences of neighbours are exact in fp32, so they show what was rounded before them."""
    x, norm = randn(2, 100, dtype=torch.float16), norm_of(randn(100, dtype=torch.float16), 1.0)
    neighbours = torch.eye(100, dtype=torch.float16)
    neighbours = (neighbours - neighbours.roll(1, dims=1)).to(x.device)
    normed = rms_norm(x, norm.weight, norm.eps, norm.offset).double()
    expected = (normed - normed.roll(-1, dims=1)).half()
    # A norm that is summed in another order may round a number differently, but not many.
    assert (linear(x, neighbours, norm=norm, cut=cut) == expected).float().mean() > 0.95


def test_no_rows_give_no_rows_and_nothing_is_launched(dtype, randn, num_launches):
    x, weight, residual = randn(0, 32, dtype=dtype), randn(20, 32, dtype=dtype), randn(0, 20, dtype=dtype)
    norm = norm_of(randn(32, dtype=dtype), 0.0)
    assert linear(x, weight, norm=norm, residual=residual).shape == (0, 20)
    assert linear(x, weight, norm=norm, activation=swiglu).shape == (0, 10)
    assert num_launches() == 0


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_nothing_that_is_given_is_changed(rows, randn):
    given = randn(rows, 32), randn(8, 32), randn(rows, 8), randn(8)
    before = [tensor.clone() for tensor in given]
    x, weight, residual, bias = given
    linear(x, weight, bias, norm_of(randn(32), 0.0), residual)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


def test_a_weight_that_does_not_fit_or_is_not_contiguous_is_refused(randn):
    with pytest.raises(ValueError, match=r"contiguous \[N, 32\]"):
        linear(randn(1, 32), randn(32, 20).t())
    with pytest.raises(ValueError, match=r"contiguous \[N, 32\]"):
        linear(randn(1, 32), randn(20, 33))


@pytest.mark.parametrize("rows", [2, 16, 21])
@pytest.mark.parametrize("splits", [2, 4])
def test_programs_that_share_the_columns_of_a_row(splits, rows, dtype, randn, check, num_launches):
    """The last of a block to arrive adds up all parts, once; the next launch finds the counters at zero."""
    cut = dataclasses.replace(SKINNY, splits=splits)
    x, weight, bias = randn(rows, 256, dtype=dtype), randn(38, 256, scale=0.1, dtype=dtype), randn(38, dtype=dtype)
    if rows > most_rows(dtype):
        pytest.skip("PyTorch computes it")
    for _ in range(2):
        check(x, weight, bias, residual=randn(rows, 38, dtype=dtype), cut=cut)
        check(x, weight, residual=randn(rows, 19, dtype=dtype), activation=swiglu, cut=cut)
    assert num_launches(skinny_kernel) == 4
    with pytest.raises(ValueError, match="is not for 96 columns: the parts must be whole tiles"):
        linear(randn(2, 96), randn(19, 96), cut=dataclasses.replace(SKINNY, splits=2))
    with pytest.raises(ValueError, match="1025 groups of programs add up parts; they are at most 1024"):
        linear(randn(2, 64), randn(16 * MAX_GROUPS + 1, 64), cut=dataclasses.replace(SKINNY, splits=2))


def test_the_table_keeps_its_rules():
    sizes = (1, 72, 576, 1152, 2048, 6912, 8192, 14336, 128256)
    for rows, N, K in itertools.product((1, 2, 4, 8, 15, 16, 17, 32, 33, MAX_ROWS), sizes, sizes[:-1]):
        for is_gated, itemsize, gpu in itertools.product((False, True), (2, 4), set(GENERATIONS.values())):
            cut = tiling(rows, N, K, is_gated, itemsize, gpu.shared_bytes)
            assert all(size == next_power_of_two(size) for size in (cut.block_n, cut.block_k))
            if cut.dot:
                rows_on_the_way = cut.block_n * (2 if is_gated else 1) + dot_rows(rows)
                assert cut.num_stages * rows_on_the_way * cut.block_k * itemsize <= gpu.shared_bytes
                assert cut.num_stages >= 2
                assert min(cut.block_n, cut.block_k) >= 16  # what a tensor core takes
                assert cut.splits == 1 or K % (cut.splits * cut.block_k) == 0
                assert cut.splits == 1 or -(-N // cut.block_n) <= MAX_GROUPS
            else:
                assert rows == 1 or cut.block_k >= K


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 65])
@pytest.mark.parametrize(("N", "K"), [(3072, 2048), (2048, 8192), (1536, 1152), (1152, 6912), (128256, 2048)])
def test_real_shapes(N, K, rows, dtype, randn, check):
    x, weight = randn(rows, K, dtype=dtype), randn(N, K, dtype=dtype, scale=0.02)
    norm, residual = norm_of(randn(K, dtype=dtype), 0.0), randn(rows, N, dtype=dtype)
    check(x, weight, norm=norm)
    check(x, weight, residual=residual)
    check(x, weight, norm=norm, activation=swiglu)
