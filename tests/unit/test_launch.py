"""The short way to a compiled kernel may be taken only where Triton itself would take that kernel."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.launch import specializations

MEMORY = torch.zeros(64, dtype=torch.uint8)


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """A tensor that begins ``offset`` numbers behind an aligned address."""
    start = -MEMORY.data_ptr() % 16
    return MEMORY[start : start + 32].view(dtype)[offset:]


ARGUMENTS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 2, 8, 16, 17, 2**31 - 1, 2**31, -(2**31), 2**63, 2**63 - 16]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.builds(tensor, st.sampled_from([torch.float32, torch.bfloat16, torch.int32]), st.integers(0, 4)),
)


@given(ARGUMENTS, ARGUMENTS)
def test_arguments_of_one_kind_are_of_one_kind_to_triton(first: Any, second: Any) -> None:
    libtriton = pytest.importorskip("triton._C.libtriton")
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")

    def of_triton(argument: Any) -> Any:
        return libtriton.native_specialize_impl(compiler.CUDABackend, argument, False, True, True)

    if specializations([first]) == specializations([second]):
        assert of_triton(first) == of_triton(second)
