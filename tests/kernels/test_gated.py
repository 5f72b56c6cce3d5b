"""SwiGLU and GeGLU in one launch, against the formulas in fp64."""

import pytest
import torch
import torch.nn.functional as F

from shared.kernels.products.gated import gated_kernel, geglu, swiglu
from tests.comparison import assert_close, assert_equal


def swiglu_formula(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate.double()) * up.double()


def geglu_formula(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate.double(), approximate="tanh") * up.double()


ACTIVATIONS = pytest.mark.parametrize(
    ("kernel", "formula"), [(swiglu, swiglu_formula), (geglu, geglu_formula)], ids=["swiglu", "geglu"]
)
FP32_ULPS = 16  # in the tails, x · exp(-|x|) and faster, an exponent loses as many steps as it is large
FP32_ULPS_OF_TERMS = 4  # of gate · up: ½ (1 + tanh u) may be computed as it is written, which cancels in the tail


@ACTIVATIONS
@pytest.mark.parametrize("shape", [(1, 1), (2, 1100), (20, 33)], ids=str)
def test_any_shape(kernel, formula, shape, stored_dtype, randn, assert_near, num_launches):
    gate, up = randn(*shape, dtype=stored_dtype), randn(*shape, dtype=stored_dtype)
    is_fp32 = stored_dtype == torch.float32
    assert_near(
        kernel(gate, up),
        formula(gate, up),
        ulps=FP32_ULPS_OF_TERMS if is_fp32 else 1,
        scale=(gate.double() * up.double()).abs() if is_fp32 else None,
        axes=("row", "gate"),
    )
    assert_equal((num_launches(gated_kernel), num_launches()), (1, 1), "launches of the kernel, and in all")


@ACTIVATIONS
def test_the_halves_of_one_matrix(kernel, formula, dtype, randn, assert_near):
    both = randn(5, 2 * 77, dtype=dtype)
    gate, up = both.chunk(2, dim=1)
    assert not gate.is_contiguous()
    assert_near(kernel(gate, up), formula(gate, up), ulps=FP32_ULPS)
    columns = randn(77, 5, dtype=dtype).t()
    assert_near(kernel(columns, up), formula(columns, up), ulps=FP32_ULPS)
    assert_near(kernel(gate, columns), formula(gate, columns), ulps=FP32_ULPS)


@ACTIVATIONS
def test_far_from_zero_the_gate_is_open_or_shut(kernel, formula, stored_dtype, device):
    far = torch.tensor([[-6e4, -1e3, -100.0, -0.0, 0.0, 100.0, 1e3, 6e4]], device=device, dtype=stored_dtype)
    up = torch.full_like(far, 0.5)
    expected = formula(far, up)
    assert_close(
        kernel(far, up).double(),
        expected,
        "product of the activation and 0.5, gates -6e4 to 6e4",
        ("row", "gate"),
        rtol=1e-6,
        atol=1e-30,
    )


@ACTIVATIONS
def test_no_rows_give_no_rows(kernel, formula, randn, num_launches):
    assert kernel(randn(0, 64), randn(0, 64)).shape == (0, 64)
    assert num_launches() == 0
