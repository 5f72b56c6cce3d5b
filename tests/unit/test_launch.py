"""Launches: which overlap on which GPU; and the short way to a compiled kernel, only where Triton would take it too."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.kernels import launch as module
from shared.kernels.launch import generation, launch, specializations

MEMORY = torch.zeros(64, dtype=torch.uint8)


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """A tensor that begins ``offset`` numbers after an aligned address."""
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


GPUS = {  # as cudaGetDeviceProperties describes them
    "A100": ((8, 0), ("Ampere", False, 163)),
    "A10": ((8, 6), ("Ampere", False, 99)),
    "L4": ((8, 9), ("Ada", False, 99)),
    "H100": ((9, 0), ("Hopper", True, 227)),
    "B300": ((10, 3), ("Blackwell", True, 227)),
    "RTX 5090": ((12, 0), ("Blackwell", True, 99)),
    "one of a later generation": ((13, 0), ("Blackwell", True, 99)),
}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, bool, int]]:
    """A GPU that is not there: the name of its generation, whether it has PDL, its shared memory in KiB."""
    capability, found = GPUS[request.param]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    generation.cache_clear()
    yield found
    generation.cache_clear()


def test_a_gpu_has_what_the_newest_generation_up_to_it_has(gpu: tuple[str, bool, int]) -> None:
    name, has_pdl, shared_kib = gpu
    found = generation(torch.device("cuda"))
    assert (found.name, found.has_pdl, found.shared_bytes // 1024) == (name, has_pdl, shared_kib)


@pytest.mark.parametrize("takes_part", [True, False])
def test_a_kernel_overlaps_where_kernel_and_gpu_can(
    takes_part: bool, gpu: tuple[str, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch goes through Triton, the second directly to the compiled kernel, with the same constexprs."""
    _, has_pdl, _ = gpu
    compiled, direct = [], []

    class Kernel:
        __name__ = "kernel"
        arg_names = ("x", "n", "BLOCK", *(["PDL"] if takes_part else []))

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*args: Any, **options: Any) -> Any:
                compiled.append(options)
                return SimpleNamespace(run=lambda *args: direct.append(args), function=1, packed_metadata=2)

            return run

    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(module, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "_COMPILED", {})
    x = SimpleNamespace(get_device=lambda: 0, device=torch.device("cuda:0"), dtype=torch.float32, data_ptr=lambda: 0)
    kernel = Kernel()
    for _ in range(2):
        launch(kernel, (3,), x, 5, BLOCK=64, num_warps=4)
    expected: dict[str, Any] = {"BLOCK": 64, "num_warps": 4}
    if takes_part:
        expected |= {"PDL": has_pdl} | ({"launch_pdl": True} if has_pdl else {})
    assert compiled == [expected]
    constexprs = (64, has_pdl) if takes_part else (64,)
    assert direct == [(3, 1, 1, 7, 1, 2, None, None, None, x, 5, *constexprs)]
