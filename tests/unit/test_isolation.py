"""Whoever makes a forward raise is found, alone, with few forwards; the others get their results."""

import traceback
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.batch import Batch
from shared.engine.draw import Drawn
from shared.engine.isolation import run_isolated
from shared.engine.request import Request
from shared.sampling.params import SamplingParams


@settings(max_examples=200, deadline=None)
@given(n=st.integers(0, 40), data=st.data())
def test_only_culprits_fail_and_order_is_kept(n: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, max(n - 1, 0)), max_size=4)) if n else set()
    requests = [Request(str(i), [i], SamplingParams(), 0) for i in range(n)]
    runs: list[list[int]] = []

    def run(batch: Batch) -> torch.Tensor:
        runs.append(batch.token_ids.tolist())
        if culprits & {*batch.token_ids.tolist()}:
            raise ValueError(f"injected into {batch.request_ids}")
        return torch.from_numpy(batch.token_ids)

    def draw(logits: torch.Tensor, rows: Sequence[Any]) -> Drawn:
        assert len(rows) == len(logits)
        return Drawn([-i for i in logits.tolist()])

    results: list[int | str] = []
    for part, drawn in run_isolated(run, draw, requests):
        if isinstance(drawn, Exception):
            assert str(drawn) == f"injected into {(part[0].request_id,)}"
            assert len(part) == 1
            results.append("failed")
        else:
            results += drawn.token_ids
    assert results == ["failed" if i in culprits else -i for i in range(n)]
    depth = max(1, n).bit_length()
    assert len(runs) <= 1 + 2 * len(culprits) * depth if n else not runs


def test_no_exception_is_alive_while_the_halves_run() -> None:
    """It would keep its frames, and with them the memory for want of which it may have been raised."""
    import sys

    requests = [Request(str(i), [i], SamplingParams(), 0) for i in range(4)]
    alive = []

    def run(batch: Batch) -> torch.Tensor:
        alive.append(sys.exc_info()[1])
        if len(batch.request_ids) > 1:
            raise RuntimeError("out of memory")
        return torch.zeros(1)

    assert len(list(run_isolated(run, lambda logits, rows: Drawn([0]), requests))) == 4
    assert alive == [None] * 7


def test_a_failure_that_is_kept_keeps_no_memory() -> None:
    """All parts of a step are kept until its last forward has run, which may need what a failed one had allocated."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def run(batch: Batch) -> torch.Tensor:
        allocated = torch.zeros(10)
        tensors.append(weakref.ref(allocated))
        raise RuntimeError("out of memory")

    requests = [Request(str(i), [i], SamplingParams(), 0) for i in range(4)]
    kept = [error for _, error in run_isolated(run, lambda logits, rows: Drawn([0]), requests)]
    assert len(kept) == 4
    assert [tensor() for tensor in tensors] == [None] * 7
    assert "raise RuntimeError" in "".join(traceback.format_exception(kept[0])), "the log shows where"


@pytest.mark.parametrize("error", [NotImplementedError, KeyboardInterrupt])
def test_what_is_no_requests_fault_goes_through(error: type[BaseException]) -> None:
    def run(batch: Batch) -> torch.Tensor:
        raise error("injected")

    requests = [Request(str(i), [i], SamplingParams(), 0) for i in range(4)]
    with pytest.raises(error, match="injected"):
        list(run_isolated(run, lambda logits, rows: Drawn([]), requests))
