"""Gate and up of many rows with their activation in one launch, on Hopper, against fp64; and for which shapes."""

from collections.abc import Callable

import pytest
import torch

from shared.checkpoints.make import make_checkpoint
from shared.kernels.gluon import HAS_GLUON
from shared.kernels.launch import GENERATIONS, generation
from shared.kernels.products import gated_gemm
from shared.kernels.products.gated import gated_kernel
from shared.kernels.products.gemv import ACTIVATIONS, linear
from shared.kernels.products.rmsnorm import rms_norm_kernel
from shared.loading.loader import load_model
from shared.models.fused import fuse
from shared.ops.gated import geglu, swiglu
from tests.comparison import assert_equal
from tests.kernels.conftest import DEVICE
from tests.kernels.products import assert_product, norm_of, normed, share_of_terms

on_hopper = pytest.mark.skipif(
    not HAS_GLUON or not generation(DEVICE).has_warpgroups, reason="Hopper's tensor cores only"
)
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``programs(n)``: the kernel runs on n multiprocessors, whatever the GPU has."""
    return lambda count: monkeypatch.setattr(gated_gemm, "num_multiprocessors", lambda device: count)


@pytest.mark.gpu
@on_hopper
@SIXTEEN_BITS
@pytest.mark.parametrize("activation", [swiglu, geglu])
@pytest.mark.parametrize(
    ("rows", "N", "K", "count"),
    [
        (128, 128, 64, 4),  # one tile, one buffer
        (256, 384, 320, 4),  # whole tiles, more buffers than there are, two tiles a program at most
        (70, 104, 72, 4),  # parts of tiles
        (129, 136, 200, 4),
        (1, 8, 8, 4),
        (700, 520, 1096, 8),  # four tiles a program, 18 buffers each, the last one in part
        (2500, 1000, 136, 100),  # two groups of tiles of rows, the last one smaller
    ],
)
def test_every_tile(rows, N, K, count, activation, dtype, randn, assert_near, programs):
    programs(count)
    x, weight = randn(rows, K, dtype=dtype), randn(2 * N, K, dtype=dtype, scale=0.2)
    out = gated_gemm.gated_gemm(x, weight, ACTIVATIONS[activation][0])
    w = weight.double()
    assert_product(assert_near, out, x.double(), w, w.abs(), share_of_terms(dtype, None), None, None, activation)


@pytest.mark.gpu
@on_hopper
@SIXTEEN_BITS
def test_a_product_that_keeps_the_gpu_busy_takes_one_launch(dtype, randn, assert_near, num_launches, programs):
    programs(128)
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
def test_a_bias_is_added_by_pytorch(randn, num_launches, programs):
    programs(128)
    x, weight = randn(2048, 96, dtype=torch.float16), randn(4096, 96, dtype=torch.float16, scale=0.2)
    linear(x, weight, activation=swiglu)
    linear(x, weight, randn(4096, dtype=torch.float16), activation=swiglu)
    assert_equal((num_launches(gated_kernel), num_launches(gated_gemm.gated_gemm_kernel)), (1, 1), "launches")


@pytest.mark.gpu
@on_hopper
def test_a_row_is_the_same_in_any_company_of_many(randn, assert_same_rows):
    x, weight = randn(2048, 512, dtype=torch.bfloat16), randn(4096, 512, dtype=torch.bfloat16)
    together = gated_gemm.gated_gemm(x, weight, "silu")
    for rows in (slice(0, 300), slice(77, 2000), slice(1024, 1025)):
        assert_same_rows(gated_gemm.gated_gemm(x[rows].contiguous(), weight, "silu"), together[rows])


@pytest.mark.gpu
@on_hopper
def test_a_fused_model_has_compiled_the_kernel(tmp_path, num_launches):
    folder = make_checkpoint("tiny-llama", tmp_path / "model", device="cuda", dtype="bfloat16")
    for dtype, count in ((torch.bfloat16, 1), (torch.float32, 1)):
        fuse(load_model(folder, dtype=dtype, device="cuda"))
        assert num_launches(gated_gemm.gated_gemm_kernel) == count


class OnHopper(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_the_kernel_computes(dtype, monkeypatch):
    monkeypatch.setattr(gated_gemm, "HAS_GLUON", True)
    monkeypatch.setattr(gated_gemm, "generation", lambda device: GENERATIONS[9, 0])
    monkeypatch.setattr(gated_gemm, "num_multiprocessors", lambda device: 4)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype).as_subclass(OnHopper)

    x, weight = zeros(256, 96), zeros(512, 96)
    assert gated_gemm.is_for(x, weight)
    assert gated_gemm.is_for(zeros(256, 104), zeros(512, 104)), "rows of a multiple of 16 bytes"
    assert gated_gemm.is_for(x, zeros(496, 96)), "columns too"
    for name, (a, b) in {
        "fp32": (zeros(256, 96, dtype=torch.float32), zeros(512, 96, dtype=torch.float32)),
        "two dtypes": (x, zeros(512, 96, dtype=torch.float32)),
        "another number of columns": (x, zeros(512, 104)),
        "columns apart": (zeros(256, 192)[:, ::2], weight),
        "rows apart": (zeros(256, 192)[:, :96], weight),
        "a strided weight": (x, zeros(512, 192)[:, :96]),
        "rows of 180 bytes": (zeros(256, 90), zeros(512, 90)),
        "results of 510 bytes": (x, zeros(510, 96)),
        "an odd address": (zeros(256 * 96 + 1)[1:].view(256, 96), weight),
        "an odd address of the weight": (x, zeros(512 * 96 + 1)[1:].view(512, 96)),
        "no columns": (x, zeros(0, 96)),
        "a tile of rows": (zeros(128, 96), weight),
    }.items():
        assert not gated_gemm.is_for(a, b), name
    monkeypatch.setattr(gated_gemm, "generation", lambda device: GENERATIONS[10, 0])
    assert not gated_gemm.is_for(x, weight), "Hopper alone"
    monkeypatch.setattr(gated_gemm, "generation", lambda device: GENERATIONS[9, 0])
    assert not gated_gemm.is_for(x.as_subclass(torch.Tensor), weight), "a CPU's tensor"
    monkeypatch.setattr(gated_gemm, "HAS_GLUON", False)
    assert not gated_gemm.is_for(x, weight)


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
        (128, 0, 1, False),
        (192, 128, 1, False),
    ],
)
def test_the_shapes_that_keep_all_programs_busy(rows, columns, programs, is_busy):
    assert gated_gemm.keeps_busy(rows, columns, programs) == is_busy
