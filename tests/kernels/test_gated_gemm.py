"""Gate and up of many rows with their activation in one launch, on Hopper, against fp64; and for which shapes."""

import pytest
import torch

from shared.kernels.gluon import HAS_GLUON
from shared.kernels.launch import INTERPRETED, generation
from shared.kernels.products import gated_gemm
from shared.kernels.products.gated import gated_kernel
from shared.kernels.products.gemv import ACTIVATIONS, linear
from shared.kernels.products.rmsnorm import rms_norm_kernel
from shared.ops.gated import geglu, swiglu
from tests.comparison import assert_equal
from tests.kernels.conftest import DEVICE
from tests.kernels.products import assert_product, norm_of, normed, share_of_terms

on_hopper = pytest.mark.skipif(
    INTERPRETED or not HAS_GLUON or not generation(DEVICE).has_warpgroups, reason="Hopper's tensor cores only"
)
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.gpu
@on_hopper
@SIXTEEN_BITS
@pytest.mark.parametrize("activation", [swiglu, geglu])
@pytest.mark.parametrize(
    ("rows", "N", "K"),
    [
        (128, 128, 64),  # one tile, one buffer
        (256, 384, 320),  # whole tiles, more buffers than there are
        (70, 104, 72),  # parts of tiles
        (129, 136, 200),
        (1, 8, 8),
        (2500, 1000, 136),  # more tiles than a GPU has multiprocessors, in two groups of rows, the last one smaller
    ],
)
def test_every_tile(rows, N, K, activation, dtype, randn, assert_near):
    x, weight = randn(rows, K, dtype=dtype), randn(2 * N, K, dtype=dtype, scale=0.2)
    out = gated_gemm.gated_gemm(x, weight, ACTIVATIONS[activation][0])
    w = weight.double()
    assert_product(assert_near, out, x.double(), w, w.abs(), share_of_terms(dtype, None), None, None, activation)


@pytest.mark.gpu
@on_hopper
@SIXTEEN_BITS
def test_a_product_that_keeps_the_gpu_busy_takes_one_launch(dtype, randn, assert_near, num_launches):
    x, weight, norm = randn(2048, 96, dtype=dtype), randn(4096, 96, dtype=dtype, scale=0.2), norm_of(randn(96), 0.0)
    norm.weight.data = norm.weight.data.to(dtype)
    residual, w = randn(2048, 2048, dtype=dtype), weight.double()
    for of_norm, addend, launched in ((None, None, (1, 0)), (norm, None, (1, 1)), (None, residual, (1, 0))):
        before = None if addend is None else addend.clone()
        counts = [num_launches(kernel) for kernel in (gated_gemm.gated_gemm_kernel, rms_norm_kernel)]
        out = linear(x, weight, norm=of_norm, residual=addend, activation=swiglu)
        after = [num_launches(kernel) for kernel in (gated_gemm.gated_gemm_kernel, rms_norm_kernel)]
        assert_equal(tuple(b - a for a, b in zip(counts, after, strict=True)), launched, "launches")
        share = share_of_terms(dtype, of_norm) + (addend is not None)  # the sum is rounded on its own
        assert_product(assert_near, out, normed(x, of_norm), w, w.abs(), share, None, before, swiglu)
    assert num_launches(gated_kernel) == 0


@pytest.mark.gpu
@on_hopper
def test_what_it_is_not_for_is_computed_in_two_launches(randn, num_launches):
    x, weight = randn(2048, 96, dtype=torch.float16), randn(4096, 96, dtype=torch.float16, scale=0.2)
    bias = randn(4096, dtype=torch.float16)
    strided = randn(2048, 192, dtype=torch.float16)[:, 48:144]
    for arguments in (
        (x, weight, bias),
        (x.float(), weight.float()),
        (x[:100], weight),  # one tile of rows
        (strided, weight),
        (x[:, :90].contiguous(), weight[:, :90].contiguous()),  # rows that do not begin at multiples of 16 bytes
        (x, weight[:4090]),
        (x.flatten()[1 : 1 + 2000 * 96].view(2000, 96), weight),
    ):
        linear(*arguments, activation=swiglu)
    assert_equal((num_launches(gated_kernel), num_launches(gated_gemm.gated_gemm_kernel)), (7, 0), "launches")


@pytest.mark.gpu
@on_hopper
def test_a_row_is_the_same_in_any_company_of_many(randn, assert_same_rows):
    x, weight = randn(2048, 512, dtype=torch.bfloat16), randn(4096, 512, dtype=torch.bfloat16)
    together = gated_gemm.gated_gemm(x, weight, "silu")
    for rows in (slice(0, 300), slice(77, 2000), slice(1024, 1025)):
        assert_same_rows(gated_gemm.gated_gemm(x[rows].contiguous(), weight, "silu"), together[rows])


@pytest.mark.parametrize(
    ("rows", "columns", "programs", "is_busy"),
    [
        (128, 128, 1, True),
        (116, 128, 1, True),
        (115, 128, 1, False),
        (512, 12288, 132, True),  # 384 tiles in 3 rounds of 132
        (256, 12288, 132, False),  # 192 in 2
        (8192, 12288, 132, True),
        (4112, 8192, 132, True),
        (129, 8192, 132, False),
        (128, 129, 2, False),
        (128, 256, 2, True),
        (128, 256, 3, False),
    ],
)
def test_the_shapes_that_keep_all_programs_busy(rows, columns, programs, is_busy):
    assert gated_gemm.keeps_busy(rows, columns, programs) == is_busy
