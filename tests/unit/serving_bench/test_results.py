"""What is made of a run: percentiles, figures, preemptions, stalls, saturation. By hand."""

import pytest

from benchmarks.report import ratio
from benchmarks.serving.results import (
    decode_stalls,
    figures,
    percentiles,
    requests_overtaken,
    saturated_figures,
    tokens_recomputed,
)
from benchmarks.serving.run import ServedRun
from tests.unit.serving_bench.by_hand import request, step


def test_figures_by_hand() -> None:
    requests = [request(0.0, 1.0, [2.0, 3.0, 5.0]), request(1.0, 4.0, [5.0, 6.0]), request(2.0, None, [], "queue full")]
    steps = [
        step(1.0, 2.0, ["0"], kv_used_tokens=10),
        step(2.0, 3.0, decoded=("0",), kv_used_tokens=20),
        step(4.0, 5.0, ["1"], decoded=("0",), kv_used_tokens=30),
        step(5.0, 6.0, decoded=("1",), kv_used_tokens=0),
    ]
    found = figures(ServedRun(requests, steps, num_forwards=5), max_batch_size=2, max_decode_interval=4)
    expected = {"num_requests": 3, "num_finished": 2, "num_errors": 1, "output_tokens": 5, "seconds": 6.0, "steps": 4}
    expected |= {"forward_passes": 5, "slot_utilisation": 5 / 8, "saturated_kv_utilisation": 0.15, "mean_step_ms": 1000}
    expected |= {"decode_stalls": 0, "requests_overtaken": 0, "preemptions": 0}
    assert {key: found[key] for key in expected} == expected
    assert found["output_tokens_per_second"] == pytest.approx(5 / 6, rel=1e-3)
    assert found["requests_per_second"] == pytest.approx(2 / 6, rel=1e-3)
    # Waits of 1 and 3 s, first tokens after 2 and 4 s, gaps of 1, 2 and 1 s, answers after 5 and 5 s.
    keys = ("queue_wait_ms", "time_to_first_token_ms", "inter_token_latency_ms", "request_latency_ms")
    assert [found[key]["p50"] for key in keys] == [2000, 3000, 1000, 5000]
    unseen = figures(ServedRun([request(0.0, None, [1.0])], steps=None, num_forwards=None), 4, 4)
    assert unseen["queue_wait_ms"] is unseen["slot_utilisation"] is unseen["decode_stalls"] is None
    # Of 1 … 5 s the place of P95 is 0.95 · 4 = 3.8, between the fourth and the fifth.
    assert percentiles([5.0, 3.0, 1.0, 2.0, 4.0]) == {"p50": 3000.0, "p95": 4800.0, "p99": 4960.0}
    assert percentiles([]) is None
    assert (ratio(3.0, 2.0), ratio(None, 2.0), ratio(3.0, None), ratio(3.0, 0.0)) == (1.5, None, None, None)


def test_a_request_that_was_preempted_counts_from_its_first_prefill() -> None:
    """Request 1 is computed, preempted, and computed anew with the two tokens it had; 2 is preempted uncomputed."""
    steps = [
        step(0, 1, ["0", "1"], num_waiting=1, num_running=2, kv_used_tokens=10),
        step(1, 2, decoded=("0", "1"), num_waiting=1, num_running=3, kv_used_tokens=12),
        step(2, 3, decoded=("0",), preempted=("2", "1"), num_waiting=2, num_running=1, kv_used_tokens=7),
        step(3, 4, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=8),
        step(4, 5, decoded=("0",), num_waiting=2, num_running=1, kv_used_tokens=9),
        step(5, 6, decoded=("0",), finished=("0",), num_waiting=2, num_running=0),
        step(6, 7, [("1", 7), "2"], num_running=2, kv_used_tokens=12),
        step(7, 8, decoded=("1", "2"), finished=("1", "2")),
    ]
    # Of the 7 tokens 5 were its prompt's and 1 its first answer's; the last it would have computed in any case.
    assert tokens_recomputed(steps) == 6
    assert decode_stalls(steps, max_decode_interval=4) == 0, "a preempted request does not decode"
    assert requests_overtaken(steps, bound=0) == 0, "it was begun in the first step"
    run = ServedRun([request(0.0, 0.0, [1.0])], steps, num_forwards=8)
    assert figures(run, max_batch_size=3, max_decode_interval=4)["preemptions"] == 2
    # Of the six steps that left any waiting: those that held memory in them, those that ended in them too.
    told = saturated_figures(run)
    assert told["peak_concurrent"] == 3
    assert told["mean_concurrent"] == pytest.approx((2 + 3 + 1 + 1 + 1 + 1) / 6)
    assert told["saturated_kv_utilisation"] == pytest.approx((10 + 12 + 7 + 8 + 9 + 0) / 600)
    assert told["saturated_tokens_per_second"] == pytest.approx(1 / 6)
    pieces, lost = [step(n, n + 1, ["0"]) for n in range(3)], step(3, 4, preempted=("0",))
    assert tokens_recomputed(pieces) == 0, "pieces of a prompt are not computed twice"
    # The second time it has only got to 10 of its 15 tokens when it is preempted again.
    assert tokens_recomputed([*pieces, lost, *pieces[:2], lost, *pieces, step(9, 10, decoded=("0",))]) == 10 + 15


def test_stalls_and_overtaking_begin_beyond_their_bounds() -> None:
    for gap, stalls in ((4, 0), (5, 1)):
        between = [step(0, 1, [str(n)]) for n in range(1, gap)]
        assert decode_stalls([step(0, 1, ["0"]), *between, step(0, 1, decoded=("0",))], 4) == stalls
    later_first = [step(0, 1, ["1", "2", "3"]), step(1, 2, ["0"])]
    assert [requests_overtaken(later_first, bound=bound) for bound in (3, 2)] == [0, 1]
    assert requests_overtaken([step(0, 1, ["3", "2", "1", "0"])], bound=0) == 0
    numbers = [step(n, n + 1, [str(n)]) for n in range(12)]  # "10" comes after "9", not after "1"
    assert requests_overtaken(numbers, bound=0) == 0
