"""What is made of a run: percentiles, figures, preemptions, stalls, saturation. By hand."""

import pytest

from benchmarks.serving.results import (
    decode_stalls,
    figures,
    percentiles,
    ratio,
    requests_overtaken,
    saturated_figures,
    slot_utilisation,
    tokens_recomputed,
)
from benchmarks.serving.run import ServedRun, TimedStep
from tests.unit.serving_bench.by_hand import request, step


def test_percentiles_are_interpolated_and_in_milliseconds() -> None:
    # Of 1 … 5 s the place of P95 is 0.95 · 4 = 3.8, between the fourth and the fifth.
    assert percentiles([5.0, 3.0, 1.0, 2.0, 4.0]) == {"p50": 3000.0, "p95": 4800.0, "p99": 4960.0}
    assert percentiles([0.25]) == {"p50": 250.0, "p95": 250.0, "p99": 250.0}
    assert percentiles([]) is None


def test_figures_by_hand() -> None:
    run = ServedRun(
        [
            request(0.0, 1.0, [2.0, 3.0, 5.0]),
            request(1.0, 4.0, [5.0, 6.0]),
            request(2.0, None, [], error="the queue is full"),
        ],
        steps=[
            step(1.0, 2.0, prefilled=["0"], kv_used_tokens=10),
            step(2.0, 3.0, decoded=("0",), kv_used_tokens=20),
            step(4.0, 5.0, prefilled=["1"], decoded=("0",), kv_used_tokens=30),
            step(5.0, 6.0, decoded=("1",), kv_used_tokens=0),
        ],
        num_forwards=5,
    )
    found = figures(run, max_batch_size=2, max_decode_interval=4)
    assert (found["num_requests"], found["num_finished"], found["num_errors"]) == (3, 2, 1)
    assert (found["output_tokens"], found["seconds"]) == (5, 6.0)
    assert found["output_tokens_per_second"] == pytest.approx(5 / 6, rel=1e-3)
    assert found["requests_per_second"] == pytest.approx(2 / 6, rel=1e-3)
    assert found["queue_wait_ms"]["p50"] == 2000  # 1 s and 3 s
    assert found["time_to_first_token_ms"]["p50"] == 3000  # 2 s and 4 s
    assert found["inter_token_latency_ms"]["p50"] == 1000  # 1, 2 and 1 s
    assert found["request_latency_ms"]["p50"] == 5000  # 5 s and 5 s
    assert found["steps"] == 4
    assert found["forward_passes"] == 5
    assert found["slot_utilisation"] == 5 / 8
    assert found["kv_utilisation"] == 0.15
    assert found["mean_step_ms"] == 1000
    assert found["decode_stalls"] == found["requests_overtaken"] == 0


def test_a_request_that_was_preempted_counts_from_its_first_prefill() -> None:
    """Request 1 is computed, preempted, and computed anew with the two tokens it had; 2 is preempted uncomputed."""
    steps = [
        step(0, 1, prefilled=["0", "1"], num_waiting=1, num_running=2, kv_used_tokens=10),
        step(1, 2, decoded=("0", "1"), num_waiting=1, num_running=3, kv_used_tokens=12),
        step(2, 3, decoded=("0",), preempted=("2", "1"), num_waiting=2, num_running=1, kv_used_tokens=7),
        step(3, 4, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=8),
        step(4, 5, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=9),
        step(5, 6, decoded=("0",), finished=("0",), num_waiting=2, num_running=0),
        step(6, 7, prefilled=[("1", 7), "2"], num_running=2, kv_used_tokens=12),
        step(7, 8, decoded=("1", "2"), finished=("1", "2")),
    ]
    # Of the 7 tokens 5 were its prompt's and 1 its first answer's; the last it would have computed in any case.
    assert tokens_recomputed(steps) == 6
    assert decode_stalls(steps, max_decode_interval=4) == 0, "who is preempted does not decode"
    assert requests_overtaken(steps, bound=0) == 0, "it was begun in the first step"
    run = ServedRun([request(0.0, 0.0, [1.0])], steps, num_forwards=8)
    found = figures(run, max_batch_size=3, max_decode_interval=4)
    assert (found["preemptions"], found["tokens_recomputed"]) == (2, 6)
    # Of the six steps that left any waiting: who held memory in them, those who ended in them too.
    told = saturated_figures(run)
    assert told["peak_concurrent"] == 3
    assert told["mean_concurrent"] == pytest.approx((2 + 3 + 1 + 1 + 1 + 1) / 6)
    assert told["saturated_kv_utilisation"] == pytest.approx((10 + 12 + 7 + 8 + 9 + 0) / 600)
    assert told["saturated_tokens_per_second"] == pytest.approx(1 / 6)


def test_overtaking_is_counted_by_the_first_prefill() -> None:
    again = [step(0, 1, prefilled=["0"]), step(1, 2, prefilled=["1"]), step(2, 3, preempted=("0",))]
    assert requests_overtaken([*again, step(3, 4, prefilled=[("0", 6)])], bound=0) == 0


def test_pieces_of_a_prompt_and_a_second_preemption_are_told_from_recomputing() -> None:
    pieces = [step(n, n + 1, prefilled=["0"]) for n in range(3)]
    assert tokens_recomputed(pieces) == 0
    lost = step(3, 4, preempted=("0",))
    assert tokens_recomputed([*pieces, lost, *pieces]) == 15
    # The second time it has only got to 10 of its 15 tokens when it is preempted again.
    assert tokens_recomputed([*pieces, lost, *pieces[:2], lost, *pieces, step(9, 10, decoded=("0",))]) == 10 + 15


def test_what_only_steps_tell_is_absent_without_them() -> None:
    found = figures(ServedRun([request(0.0, None, [1.0])], steps=None, num_forwards=None), 4, 4)
    assert found["queue_wait_ms"] is found["slot_utilisation"] is found["decode_stalls"] is None
    assert found["request_latency_ms"]["p99"] == 1000


def test_a_stall_is_a_gap_of_more_steps_than_allowed() -> None:
    def steps(gap: int) -> list[TimedStep]:
        between = [step(0, 1, prefilled=[str(n)]) for n in range(1, gap)]
        return [step(0, 1, prefilled=["0"]), *between, step(0, 1, decoded=("0",))]

    assert decode_stalls(steps(4), max_decode_interval=4) == 0
    assert decode_stalls(steps(5), max_decode_interval=4) == 1


def test_overtaken_is_who_was_begun_after_too_many_that_came_later() -> None:
    later_first = [step(0, 1, prefilled=["1", "2", "3"]), step(1, 2, prefilled=["0"])]
    assert requests_overtaken(later_first, bound=3) == 0
    assert requests_overtaken(later_first, bound=2) == 1
    together = [step(0, 1, prefilled=["3", "2", "1", "0"])]
    assert requests_overtaken(together, bound=0) == 0
    numbers = [step(n, n + 1, prefilled=[str(n)]) for n in range(12)]  # "10" comes after "9", not after "1"
    assert requests_overtaken(numbers, bound=0) == 0


def test_saturated_throughput_ends_with_the_last_step_that_left_any_waiting() -> None:
    steps = [step(0, 1, num_waiting=3), step(1, 2, num_waiting=1), step(2, 4, num_waiting=0), step(4, 9)]
    run = ServedRun([request(0.0, 0.0, [1.0, 2.0, 4.0, 9.0]), request(0.0, 0.0, [2.0, 4.0])], steps, 4)
    assert saturated_figures(run)["saturated_tokens_per_second"] == 3 / 2
    never = ServedRun([request(0.0, 0.0, [1.0, 2.0])], [step(0, 1), step(1, 2)], 2)
    assert saturated_figures(never)["saturated_tokens_per_second"] == 2 / 2


def test_regions_and_ratios() -> None:
    assert slot_utilisation([step(0, 1, prefilled=["0"], decoded=("1", "2")), step(1, 2, decoded=("1",))], 4) == 0.5
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(3.0, None) is ratio(3.0, 0.0) is None
