"""Traces of requests, the sizes of the workloads, the memory of the capacity benchmark."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.serving import BLOCK_SIZE, DEMO, FULL, LARGE, ServingSize, Workload, make_trace
from tests.unit.serving_bench.by_hand import MIXED


def test_a_trace_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert make_trace(MIXED, 100, seed=3) == make_trace(MIXED, 100, seed=3)
    assert make_trace(MIXED, 100, seed=3, rate=5.0) == make_trace(MIXED, 100, seed=3, rate=5.0)
    assert make_trace(MIXED, 100, seed=3) != make_trace(MIXED, 100, seed=4)
    assert make_trace(MIXED, 100, seed=3) != make_trace(replace(MIXED, name="other"), 100, seed=3)


def test_lengths_reach_both_bounds_and_ids_the_vocabulary() -> None:
    trace = make_trace(replace(MIXED, num_requests=400), 50, seed=0)
    assert {len(r.prompt_ids) for r in trace.requests} == set(range(8, 21))
    assert {r.new_tokens for r in trace.requests} == set(range(3, 10))
    assert {token for r in trace.requests for token in r.prompt_ids} == set(range(50))
    assert trace.new_tokens == sum(r.new_tokens for r in trace.requests)


@given(st.floats(0.01, 1000), st.integers(0, 2**32))
def test_poisson_arrivals_ascend_and_scale_with_the_rate(rate: float, seed: int) -> None:
    trace, once = make_trace(MIXED, 100, seed, rate), make_trace(MIXED, 100, seed, 1.0)
    times = [r.arrival for r in trace.requests]
    assert times[0] == 0
    assert times == sorted(times)
    assert trace.concurrency is None
    assert np.allclose(times, [r.arrival / rate for r in once.requests])
    loop = make_trace(MIXED, 100, seed)
    assert loop.concurrency == 4
    assert [(r.prompt_ids, r.new_tokens) for r in trace.requests] == [
        (r.prompt_ids, r.new_tokens) for r in loop.requests
    ]


def test_a_shared_prefix_is_shared_and_no_more_than_that() -> None:
    trace = make_trace(Workload("w3", "W3", 10, 2, (36, 40), (2, 2), shared_prefix_tokens=32), 10_000, seed=0)
    assert len({r.prompt_ids[:32] for r in trace.requests}) == 1
    assert len({r.prompt_ids[32:] for r in trace.requests}) == 10
    assert all(36 <= len(r.prompt_ids) <= 40 for r in trace.requests)


def test_the_sizes_are_those_of_the_course() -> None:
    assert (FULL.w1.prompt_tokens, FULL.w1.new_tokens) == ((256, 256), (256, 256))
    assert (FULL.w2.concurrency, FULL.w2.prompt_tokens, FULL.w2.new_tokens) == (16, (32, 1024), (64, 256))
    assert (FULL.tail.num_requests, FULL.max_batch_size) == (512, 16)
    assert (FULL.tail.prompt_tokens, FULL.tail.new_tokens) == (FULL.w2.prompt_tokens, FULL.w2.new_tokens)
    assert FULL.backlog.concurrency == FULL.max_batch_size + 64
    assert (FULL.together.num_requests, FULL.together.new_tokens) == (64, (128, 128))
    assert LARGE.w2.concurrency == LARGE.max_batch_size == 64
    assert (FULL.capacity.prompt_tokens, FULL.capacity.new_tokens) == (FULL.w2.prompt_tokens, FULL.w2.new_tokens)
    assert (FULL.wide_slots[1], FULL.capacity.longest) == (4096, 1280)


@pytest.mark.parametrize("size", [FULL, LARGE, DEMO])
def test_the_memory_of_capacity_divides_into_regions_and_blocks_and_leaves_a_queue(size: ServingSize) -> None:
    assert size.capacity_tokens % size.capacity.longest == size.capacity_tokens % BLOCK_SIZE == 0
    num_tight = size.capacity_tokens // size.capacity.longest
    num_wide = size.wide_slots[0]
    # The regions' widths are to each other as 4,096 to 1,280, whatever the scale.
    assert num_tight / num_wide == pytest.approx(4096 / 1280)
    mean = np.mean(size.capacity.prompt_tokens) + np.mean(size.capacity.new_tokens)
    fit = size.capacity_tokens / (mean + BLOCK_SIZE / 2)
    assert num_tight < fit < size.capacity.num_requests / 2, "more wait than run"
    assert size.capacity_batch > 1.4 * fit, "memory is what limits them"
    assert size.capacity.concurrency == size.capacity.num_requests
