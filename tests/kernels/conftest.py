"""One way to run the kernel tests: on a GPU for real, elsewhere through Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/kernels

The variable must be set before Triton is imported, so these tests are a run of their own; without it and without a GPU
they skip. Every buffer that a launcher allocates is filled with NaN first, so a number that a kernel does not write is
found; and in the interpreter each address is checked (`tests.kernels.bounds`).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy
import pytest
import torch

from shared.kernels import NO_TRITON
from shared.kernels.launch import INTERPRETED, LAUNCHES
from tests.comparison import assert_equal, assert_rows_close, assert_within

if INTERPRETED:
    from tests.kernels.bounds import check_accesses
    from tests.kernels.kept_types import keep_types

    check_accesses()
    keep_types()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch's deterministic mode asks of cuBLAS

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BFLOAT16_ON_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


class SkippedFile(pytest.Module):
    """A file of kernel tests where no kernel can run: one skip, and nothing is imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(NO_TRITON or "needs a GPU, or Triton's interpreter: TRITON_INTERPRET=1 pytest tests/kernels")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if INTERPRETED or torch.cuda.is_available():
        return None
    return SkippedFile.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU all of them run on it, and `make test-gpu` finds them by their mark."""
    if torch.cuda.is_available() and not INTERPRETED:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker("gpu")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run of these tests alone succeeds without Triton: that no test was collected is no mistake of its caller."""
    if NO_TRITON and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_runtest_setup(item: pytest.Item) -> None:
    if INTERPRETED and item.get_closest_marker("gpu"):
        pytest.skip("Triton's interpreter cannot do this; it runs on a GPU, without TRITON_INTERPRET")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fills what torch.empty and its like give with NaN; no TF32; numpy is silent about infinities."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public call loads a compiler, for seconds
    with numpy.errstate(all="ignore"), torch.inference_mode():
        yield
    torch._C._set_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(params=[torch.float32, torch.float16, BFLOAT16_ON_GPU], ids=lambda dtype: str(dtype)[6:])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """For kernels that compute in the dtype itself (``tl.dot``): the interpreter has no bf16 arithmetic."""
    return request.param


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def stored_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """For kernels that load it, compute in fp32 and store it. The interpreter truncates bf16: allow one ulp more."""
    return request.param


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    """``randn(*shape, dtype=float32, scale=1.0)``: normal numbers on the device, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)

    return draw


@pytest.fixture
def assert_near() -> Callable[..., None]:
    """``assert_near(actual, expected, ulps=1.0, scale=None, what="result", axes=("row", "column"))``: expected in fp64,
    the bound in steps of actual's dtype.

    A step is the dtype's eps times ``scale``, by default the magnitude of each expected number. A sum that cancels is
    wrong by steps of its terms, so there ``scale`` is the sum of their magnitudes. The smallest normal number of the
    dtype is the least scale.
    """

    def check(
        actual: torch.Tensor,
        expected: torch.Tensor,
        ulps: float = 1.0,
        scale: torch.Tensor | None = None,
        what: str = "result",
        axes: tuple[str, ...] = ("row", "column"),
    ) -> None:
        assert expected.dtype == torch.float64, "what is expected is computed in fp64"
        assert actual.shape == expected.shape, f"{what}: expected the shape {[*expected.shape]}, got {[*actual.shape]}"
        numbers = torch.finfo(actual.dtype)
        if INTERPRETED and actual.dtype == torch.bfloat16:
            ulps += 1
        steps = (expected.abs() if scale is None else scale).clamp(min=numbers.tiny) * numbers.eps
        unit = f"{ulps:g} rounding steps of {str(actual.dtype).removeprefix('torch.')}"
        assert_within(actual, expected, ulps * steps, what, axes, unit)

    return check


@pytest.fixture
def assert_same_rows() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``assert_same_rows(alone, together)``: bit for bit on a GPU.

    The interpreter multiplies with numpy, whose sums depend on the place of a row on some CPUs: there rows may differ
    by the rounding of a sum.
    """

    def check(alone: torch.Tensor, together: torch.Tensor) -> None:
        if INTERPRETED:
            assert_rows_close(alone, together, 8 * torch.finfo(alone.dtype).eps, "rows alone", ("row", "column"))
        else:
            assert_equal(alone, together, "rows alone", ("row", "column"))

    return check


@pytest.fixture
def num_launches() -> Callable[..., int]:
    """``num_launches(kernel)``: how often a kernel was launched in this test; without a kernel: all launches."""
    before = LAUNCHES.copy()

    def count(kernel: object = None) -> int:
        made = LAUNCHES - before
        return made.total() if kernel is None else made[kernel.__name__]  # type: ignore[attr-defined]

    return count


@pytest.fixture
def only_the_caches_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, norms and sampling take the interpreter seconds per step, and do not depend on buckets."""
    from shared.kernels.products import gemv, rmsnorm
    from shared.kernels.sampling import sampler

    if INTERPRETED:
        for module in (gemv, rmsnorm, sampler):
            monkeypatch.setattr(module, "launches", lambda tensor: False)
