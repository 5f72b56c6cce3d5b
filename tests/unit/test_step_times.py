"""What steps compute, counted from their records, and the coefficients that fit their times."""

import random

import pytest

from benchmarks.deployment_check import _step_times
from benchmarks.step_times import COUNTS, StepCounts
from shared.engine.record import StepRecord


def record(prefilled: dict[str, tuple[int, int]], decoded: str = "", finished: str = "") -> StepRecord:
    """``prefilled``: of each request the tokens and the first of them."""
    return StepRecord(
        step=0,
        prefilled=tuple((name, num) for name, (num, _) in prefilled.items()),
        decoded=tuple(decoded),
        finished=tuple(finished),
        failed=(),
        num_waiting=0,
        num_running=0,
        kv_used_tokens=0,
        kv_capacity_tokens=0,
        prefill_starts=tuple(start for _, start in prefilled.values()),
    )


def test_counts_of_chunks_of_decoding_requests_and_of_what_they_attend_to() -> None:
    counts = StepCounts()
    assert counts.of(record({"a": (3, 0), "b": (2, 4)})) == [1, 1, 5, (1 + 2 + 3) + (5 + 6), 0, 0]
    assert counts.of(record({"c": (1, 0)}, decoded="ab", finished="b")) == [1, 1, 1, 1, 2, 4 + 7]
    assert counts.of(record({}, decoded="ac")) == [1, 0, 0, 0, 2, 5 + 2]
    assert counts.of(record({})) == []


def test_coefficients_are_found_again_and_their_sum_is_that_of_the_steps() -> None:
    draw, given = random.Random(0), [0.01, 0.004, 1e-4, 0.0, 1e-3, 1e-6]
    steps = []
    for _ in range(400):
        tokens, rows = draw.choice([0, draw.randrange(1, 200)]), draw.randrange(9)
        counts = [1.0, float(tokens > 0), float(tokens), tokens * 50.0, float(rows), rows * draw.uniform(10, 300)]
        seconds = sum(each * count for each, count in zip(given, counts, strict=True))
        steps.append((counts, seconds * draw.uniform(0.9, 1.3)))
    times, error = _step_times(steps)
    assert 0.05 < error < 0.15
    found = [getattr(times, name) for name in COUNTS]
    total = sum(sum(each * count for each, count in zip(found, counts, strict=True)) for counts, _ in steps)
    assert total == pytest.approx(sum(seconds for _, seconds in steps))
    assert found[0] == pytest.approx(1.1 * given[0], rel=0.1)
    assert found[4] == pytest.approx(1.1 * given[4], rel=0.1)
