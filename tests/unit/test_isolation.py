"""A sequence that makes a run raise is found, alone, with few runs; the others get their results."""

import sys
import traceback
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.executor.isolation import run_isolated
from tests.comparison import assert_equal


@pytest.mark.failing_forwards
@settings(max_examples=200)
@given(n=st.integers(0, 40), start=st.integers(0, 5), data=st.data())
def test_only_culprits_fail_and_order_is_kept(n: int, start: int, data: st.DataObject) -> None:
    sequences = range(start, start + n)
    culprits = data.draw(st.sets(st.sampled_from(sequences), max_size=4)) if n else set()
    runs: list[range] = []

    def run(part: range) -> list[int]:
        runs.append(part)
        if culprits & {*part}:
            raise ValueError(f"injected into {part}")
        return [-i for i in part]

    results: list[int | str] = []
    numbers: list[int] = []
    for part, result in run_isolated(run, sequences):
        numbers += part
        if isinstance(result, Exception):
            assert_equal(str(result), f"injected into {part}", "failure of a part")
            assert_equal(len(part), 1, "sequences of a part that failed")
            results.append("failed")
        else:
            results += result
    assert_equal(
        numbers, [*sequences], f"sequences {sequences}, culprits {culprits}: each in one part and in order", ("place",)
    )
    assert_equal(
        results, ["failed" if i in culprits else -i for i in sequences], f"results, culprits {culprits}", ("sequence",)
    )
    depth = max(1, n).bit_length()
    assert len(runs) <= (1 + 2 * len(culprits) * depth if n else 0), f"{len(runs)} runs to find {len(culprits)} of {n}"


@pytest.mark.failing_forwards
def test_no_exception_is_alive_while_the_halves_run() -> None:
    """It would keep its frames, and with them the memory for want of which it may have been raised."""
    alive = []

    def run(part: range) -> int:
        alive.append(sys.exc_info()[1])
        if len(part) > 1:
            raise RuntimeError("out of memory")
        return 0

    assert_equal(len(list(run_isolated(run, range(4)))), 4, "parts")
    assert_equal(alive, [None] * 7, "exceptions alive in each run", ("run",))


@pytest.mark.failing_forwards
def test_a_failure_that_is_kept_keeps_no_memory() -> None:
    """All parts of a step are kept until its last forward has run, which may need what a failed one had allocated."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def run(part: range) -> int:
        allocated = torch.zeros(10)
        tensors.append(weakref.ref(allocated))
        raise RuntimeError("out of memory")

    kept = [error for _, error in run_isolated(run, range(4))]
    assert_equal(len(kept), 4, "failures")
    assert_equal([tensor() for tensor in tensors], [None] * 7, "tensors still alive", ("run",))
    assert_equal(type(kept[0]), RuntimeError, "kept failure")
    assert "raise RuntimeError" in "".join(traceback.format_exception(kept[0])), "the log shows where"


@pytest.mark.parametrize("error", [NotImplementedError, KeyboardInterrupt])
def test_what_is_no_requests_fault_goes_through(error: type[BaseException]) -> None:
    def run(part: range) -> int:
        raise error("injected")

    with pytest.raises(error, match="injected"):
        list(run_isolated(run, range(4)))
