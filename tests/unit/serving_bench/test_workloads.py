"""Traces of requests, the sizes of the workloads, the memory of the capacity benchmark."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.memory import BLOCK_SIZE, capacity_batch, check_sizes
from benchmarks.workloads.serving import DEMO, FULL, LARGE, ServingSize, Workload, make_trace
from shared.errors import ConfigError
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


def test_poisson_gaps_are_exponential() -> None:
    trace = make_trace(replace(MIXED, num_requests=4000, prompt_tokens=(1, 1)), 100, seed=1, rate=8.0)
    gaps = np.diff([r.arrival for r in trace.requests])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.08)
    assert (gaps > 1 / 8).mean() == pytest.approx(np.exp(-1), abs=0.03)


def test_a_shared_prefix_is_shared_and_no_more_than_that() -> None:
    trace = make_trace(Workload("w3", "W3", 10, 2, (36, 40), (2, 2), shared_prefix_tokens=32), 10_000, seed=0)
    assert len({r.prompt_ids[:32] for r in trace.requests}) == 1
    assert len({r.prompt_ids[32:] for r in trace.requests}) == 10
    assert all(36 <= len(r.prompt_ids) <= 40 for r in trace.requests)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_requests": 0}, "num_requests of workload mixed is 0"),
        ({"concurrency": 0}, "concurrency of workload mixed is 0"),
        ({"prompt_tokens": (9, 8)}, "between 9 and 8"),
        ({"new_tokens": (0, 3)}, "between 0 and 3"),
        ({"shared_prefix_tokens": 8}, "a token of its own"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(MIXED, **change)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="it must be positive"):
        make_trace(MIXED, 100, seed=0, rate=rate)


def test_the_sizes_are_those_of_the_course() -> None:
    assert (FULL.w1.prompt_tokens, FULL.w1.new_tokens) == ((256, 256), (256, 256))
    assert (FULL.w2.concurrency, FULL.w2.prompt_tokens, FULL.w2.new_tokens) == (16, (32, 1024), (64, 256))
    assert (FULL.tail.num_requests, FULL.max_batch_size) == (512, 16)
    assert (FULL.tail.prompt_tokens, FULL.tail.new_tokens) == (FULL.w2.prompt_tokens, FULL.w2.new_tokens)
    assert FULL.backlog.concurrency == FULL.max_batch_size + 64
    assert (FULL.together.num_requests, FULL.together.new_tokens) == (64, (128, 128))
    assert LARGE.w2.concurrency == LARGE.max_batch_size == 64
    assert list(DEMO.workloads) == ["w1", "w2", "w3"]
    assert (FULL.capacity.prompt_tokens, FULL.capacity.new_tokens) == (FULL.w2.prompt_tokens, FULL.w2.new_tokens)
    assert (FULL.wide_slots[1], FULL.capacity.longest) == (4096, 1280)
    assert DEMO.with_tail_requests(5).tail.num_requests == 5


@pytest.mark.parametrize("size", [FULL, LARGE, DEMO])
def test_the_memory_of_capacity_divides_into_regions_and_blocks_and_leaves_a_queue(size: ServingSize) -> None:
    check_sizes(size)
    num_tight = size.capacity_tokens // size.capacity.longest
    num_wide = size.wide_slots[0]
    # The regions' widths are to each other as 4,096 to 1,280, whatever the scale.
    assert num_tight / num_wide == pytest.approx(4096 / 1280)
    mean = np.mean(size.capacity.prompt_tokens) + np.mean(size.capacity.new_tokens)
    fit = size.capacity_tokens / (mean + BLOCK_SIZE / 2)
    assert num_tight < fit < size.capacity.num_requests / 2, "more wait than run"
    assert capacity_batch(size) > 1.4 * fit, "memory is what limits them"
    assert size.capacity.concurrency == size.capacity.num_requests


@pytest.mark.parametrize("wide", [(5, 250), (3, 256), (0, 256), (16, 64)])
def test_a_memory_that_does_not_divide_is_refused(wide: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"{wide[0]} regions of {wide[1]} tokens"):
        check_sizes(replace(DEMO, wide_slots=wide))
