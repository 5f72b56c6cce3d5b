"""Traces of requests, the sizes of the workloads, the memory of the capacity benchmark."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.workloads.serving import BLOCK_SIZE, DEMO, FULL, LARGE, ServingSize, Workload, make_trace
from tests.unit.serving_bench.by_hand import MIXED


def test_a_trace_follows_from_workload_and_seed_and_reaches_its_bounds() -> None:
    assert make_trace(MIXED, 100, seed=3) == make_trace(MIXED, 100, seed=3)
    assert make_trace(MIXED, 100, seed=3) != make_trace(MIXED, 100, seed=4)
    assert make_trace(MIXED, 100, seed=3) != make_trace(replace(MIXED, name="other"), 100, seed=3)
    trace = make_trace(replace(MIXED, num_requests=400), 50, seed=0)
    assert {len(r.prompt_ids) for r in trace.requests} == set(range(8, 21))
    assert {r.new_tokens for r in trace.requests} == set(range(3, 10))
    assert {token for r in trace.requests for token in r.prompt_ids} == set(range(50))
    trace = make_trace(Workload("w3", "W3", 10, 2, (36, 40), (2, 2), shared_prefix_tokens=32), 10_000, seed=0)
    assert [len({r.prompt_ids[part] for r in trace.requests}) for part in (slice(32), slice(32, None))] == [1, 10]
    assert all(36 <= len(r.prompt_ids) <= 40 for r in trace.requests)


def test_poisson_arrivals_are_the_same_requests_and_scale_with_the_rate() -> None:
    loop, once, fast = (make_trace(MIXED, 100, 7, rate) for rate in (None, 1.0, 8.0))
    assert (loop.concurrency, once.concurrency, loop.requests[0].arrival) == (4, None, None)
    times = [r.arrival or 0.0 for r in fast.requests]
    assert (times[0], times) == (0, sorted(times))
    assert np.allclose(times, [(r.arrival or 0.0) / 8 for r in once.requests])
    assert [replace(r, arrival=None) for r in fast.requests] == list(loop.requests)


@pytest.mark.parametrize("size", [FULL, LARGE, DEMO])
def test_the_memory_of_capacity_divides_into_regions_and_blocks_and_leaves_a_queue(size: ServingSize) -> None:
    assert size.capacity_tokens % size.capacity.longest == size.capacity_tokens % BLOCK_SIZE == 0
    num_tight = size.capacity_tokens // size.capacity.longest
    assert num_tight / size.wide_slots[0] == pytest.approx(4096 / 1280), "the regions' widths, whatever the scale"
    mean = np.mean(size.capacity.prompt_tokens) + np.mean(size.capacity.new_tokens)
    fit = size.capacity_tokens / (mean + BLOCK_SIZE / 2)
    assert num_tight < fit < size.capacity.num_requests / 2, "more wait than run"
    assert size.capacity_batch > 1.4 * fit, "memory is what limits them"
