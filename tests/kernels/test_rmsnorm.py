"""RMSNorm and its neighbours in one launch, against the formula in fp64."""

import pytest
import torch

from shared.kernels.products.rmsnorm import add_rms_norm, rms_norm, rms_norm_kernel
from shared.models.norm import RMSNorm
from tests.comparison import assert_equal

EPS = 1e-6


def formula(x: torch.Tensor, weight: torch.Tensor, offset: float, eps: float = EPS) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def norm_module(weight: torch.Tensor, offset: float) -> RMSNorm:
    norm = RMSNorm(len(weight), EPS, offset)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def test_what_a_launcher_allocates_starts_as_nan(device):
    assert torch.empty(100, dtype=torch.float16, device=device).isnan().all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 1), (5, 33), (7, 1000), (2, 3, 96), (1, 5120)], ids=str)
def test_a_norm_of_any_shape(shape, offset, stored_dtype, randn, assert_near):
    x, weight = randn(*shape, dtype=stored_dtype), randn(shape[-1], dtype=stored_dtype)
    assert_near(rms_norm(x, weight, EPS, offset), formula(x, weight, offset), ulps=3)


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 100.0, 1e4])
def test_small_and_large_vectors(scale, stored_dtype, randn, assert_near):
    x, weight = randn(4, 200, dtype=stored_dtype, scale=scale), randn(200, dtype=stored_dtype)
    x[1] = 0
    x[2, 7] = torch.finfo(stored_dtype).max if stored_dtype == torch.float16 else 1e15
    assert_near(rms_norm(x, weight, EPS), formula(x, weight, 0.0), ulps=3)


def test_rows_and_columns_may_lie_apart(dtype, randn, assert_near):
    wide, weight = randn(6, 300, dtype=dtype), randn(100, dtype=dtype)
    columns = randn(100, 6, dtype=dtype).t()
    heads = randn(3, 4, 400, dtype=dtype).transpose(0, 1)[:, 1:, 50:150]  # [4, 2, 100], no two strides agree
    for x in (wide[:, 100:200], wide[::2, 17:117], columns, wide[:1, 5:105].expand(4, 100), heads):
        assert_near(rms_norm(x, weight, EPS, 1.0), formula(x, weight, 1.0), ulps=3)


@pytest.mark.parametrize("post_offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 96), (5, 33), (3, 1000)], ids=str)
def test_add_then_norm(shape, post_offset, stored_dtype, randn, assert_near, num_launches):
    wide = randn(shape[0], 3 * shape[1], dtype=stored_dtype)
    x, residual = wide[:, shape[1] : 2 * shape[1]], wide[:, 2 * shape[1] :]
    weight = randn(shape[1], dtype=stored_dtype)
    post = None if post_offset is None else norm_module(randn(shape[1], dtype=stored_dtype), post_offset)
    expected = x.double() if post is None else formula(x, post.weight, post.offset)
    terms = expected.abs() + residual.double().abs()

    normed, summed = add_rms_norm(x, residual, weight, EPS, 1.0, post)

    assert_near(summed, expected + residual.double(), ulps=2, scale=terms, what="sum")
    assert_equal((num_launches(rms_norm_kernel), num_launches()), (1, 1), "launches of the kernel, and in all")
    assert_near(normed, formula(summed, weight, 1.0), ulps=3, what="normed sum")
    assert_equal(normed, rms_norm(summed, weight, EPS, 1.0), "norm of the rounded sum", ("row", "column"))


@pytest.mark.parametrize("shape", [(1, 96), (5, 33), (2, 3, 64)], ids=str)
def test_norm_then_add(shape, stored_dtype, randn, assert_near, num_launches):
    x, weight = randn(*shape, dtype=stored_dtype), randn(shape[-1], dtype=stored_dtype)
    residual = randn(*shape[:-1], 2 * shape[-1], dtype=stored_dtype, scale=30)[..., shape[-1] :]
    before = residual.clone()
    expected = formula(x, weight, 1.0)

    out = rms_norm(x, weight, EPS, 1.0, residual)

    assert_near(out, expected + residual.double(), ulps=2, scale=expected.abs() + residual.double().abs())
    assert_equal((num_launches(rms_norm_kernel), num_launches()), (1, 1), "launches of the kernel, and in all")
    assert_equal(residual, before, "the residual, which must not change", ("row", "column"))


def test_no_rows_give_no_rows(dtype, randn, num_launches):
    x, weight = randn(0, 64, dtype=dtype), randn(64, dtype=dtype)
    normed, summed = add_rms_norm(x, x, weight, EPS)
    assert rms_norm(x, weight, EPS).shape == rms_norm(x, weight, EPS, 0.0, x).shape == (0, 64)
    assert normed.shape == summed.shape == (0, 64)
    assert num_launches() == 0


def test_epsilon_stands_inside_the_root(randn, assert_near):
    x, weight = randn(2, 64, scale=1e-3), randn(64)
    assert_near(rms_norm(x, weight, 0.01), formula(x, weight, 0.0, eps=0.01), ulps=3)
