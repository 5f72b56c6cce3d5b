"""The number of drafts follows the acceptance that was measured."""

from itertools import product
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.speculation.adaptive import LONGEST_WAIT, PATIENCE, DraftLengths, StepTimes, best_lengths


def make_request() -> Request:
    return Request("a", [1], SamplingParams(), 0)


def run(lengths: DraftLengths, request: Request, rate: float, num_steps: int, seed: int = 0) -> tuple[int, int]:
    """Drafts and tokens of steps in which each draft behind accepted ones is accepted with chance ``rate``."""
    chance, num_drafts, num_tokens = Random(seed), 0, 0
    for _ in range(num_steps):
        length = lengths.next_lengths([request])[0]
        accepted = 0
        while accepted < length and chance.random() < rate:
            accepted += 1
        if length:
            lengths.count(request, length, accepted)
        num_drafts += length
        num_tokens += 1 + accepted
    return num_drafts, num_tokens


@example(rates=[1.0, 0.25, 0.25], longest=2, plain=1.0, overhead=0.0, row=0.125, drafting=0.0)  # one of two that tie
@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    longest=st.integers(1, 3),
    plain=st.floats(0.5, 2),
    overhead=st.floats(0, 1),
    row=st.floats(0, 1),
    drafting=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_best_lengths_give_most_tokens_per_time(
    rates: list[float], longest: int, plain: float, overhead: float, row: float, drafting: float
) -> None:
    """Compared with all other choices."""
    B = len(rates)
    times = plain, plain + overhead + B * row, plain + overhead + longest * B * row, 1.5 * drafting, drafting

    def speed(lengths: tuple[int, ...]) -> float:
        num_tokens = sum(rate**n for rate, length in zip(rates, lengths, strict=True) for n in range(length + 1))
        num_drafts = sum(lengths)
        verifying = plain + overhead + max(num_drafts, B) * row if num_drafts else plain
        return num_tokens / (verifying + (max(lengths) + 0.5 * any(lengths)) * drafting)

    choices = product(range(longest + 1), repeat=B)
    assert speed(tuple(best_lengths(rates, longest, *times))) == pytest.approx(max(map(speed, choices)))


def test_where_rows_cost_as_much_as_steps_only_likely_drafts_are_verified() -> None:
    """On a large batch a draft must be likelier than a request's next token is cheap."""
    cheap, dear = (1.0, 1.02, 1.1, 0.0, 0.0), (1.0, 1.9, 5.0, 0.0, 0.0)
    rates = [0.9, 0.5, 0.1]
    assert best_lengths(rates, 5, *cheap) == [5, 4, 1]
    assert best_lengths(rates, 5, *dear) == [0, 0, 0]
    assert best_lengths([0.98, 0.5, 0.1], 5, *(1.0, 1.2, 3.0, 0.0, 0.0))[1:] == [0, 0]


def test_probes_of_all_requests_fall_into_the_same_steps() -> None:
    lengths, requests = DraftLengths(5), [make_request() for _ in range(20)]
    steps_with_drafts = 0
    for number in range(600):
        chosen = lengths.next_lengths(requests[: 1 + number // 10])  # they arrive one by one
        for request, length in zip(requests, chosen, strict=False):
            if length:
                lengths.count(request, length, 0)
        steps_with_drafts += number >= 400 and any(chosen)
    assert 2 <= steps_with_drafts <= 4


def test_times_between_and_behind_the_measured_sizes() -> None:
    times = StepTimes([1, 2, 4], [1, 2, 4], [2, 3, 5], [5, 6, 8], [0, 0, 1], [0, 0, 2])
    assert times.of(3) == (3.0, 4.0, 7.0, 0.5, 1.0)
    assert times.of(8) == (8.0, 9.0, 12.0, 3.0, 6.0)
    assert StepTimes([1], [1], [2], [3], [0], [0]).of(9) == (1.0, 2.0, 3.0, 0.0, 0.0)


def test_drafts_that_are_accepted_become_more_and_useless_ones_cease() -> None:
    for rate, low, high in ((1.0, 4.9, 5.0), (0.8, 3.0, 4.9), (0.5, 1.0, 3.0), (0.0, 0.0, 0.06)):
        num_drafts, _ = run(DraftLengths(5), make_request(), rate, 1000)
        assert low <= num_drafts / 1000 <= high, rate


def seconds(times: StepTimes, attempt_steps: int, rate: float, num_steps: int) -> tuple[float, int]:
    """The time that steps take in plain steps, and the drafts in them; an attempt's first steps have masks alone."""
    lengths, request, chance = DraftLengths(3, times=times, attempt_steps=attempt_steps), make_request(), Random(0)
    plain, short, _, first, _ = times.of(1)
    taken, num_drafts, num_tokens = 0.0, 0, 0
    while num_tokens < num_steps:
        drafts = min(lengths.next_lengths([request])[0], 1)
        num_drafts += drafts
        taken += attempt_steps * short + first if drafts else plain
        accepted = int(drafts and chance.random() < rate)
        num_tokens += (attempt_steps if drafts else 1) + accepted
        if drafts:
            lengths.count(request, 1, accepted)
    return taken / plain, num_drafts


BOUND_BY_LAUNCHES = StepTimes([1], [0.528], [1.292], [1.299], [0.107], [0.107])
"""Milliseconds on an H100 of the demo model's shape, with an adapter."""


@pytest.mark.parametrize(
    ("times", "attempt_steps"),
    [
        (BOUND_BY_LAUNCHES, 2),
        (StepTimes([1], [0.462], [0.992], [0.998], [0.0], [0.0]), 1),  # the same with drafts by lookup
        (StepTimes([1], [2.50], [3.61], [3.90], [0.176], [0.176]), 2),  # Llama-3.2-3B with an adapter
        (StepTimes([1], [1.0], [1.0], [1.0], [0.3], [0.2]), 1),  # a draft model
        (StepTimes([1], [1.0], [2.2], [2.2], [0.0], [0.0]), 2),
    ],
    ids=["adapter", "lookup", "3B", "draft model", "steep"],
)
def test_attempts_are_rarer_where_they_cost_more(times: StepTimes, attempt_steps: int) -> None:
    for num_steps in (200, 500, 2000):
        taken, num_drafts = seconds(times, attempt_steps, 0.0, num_steps)
        assert num_drafts >= 2, "it is tried again"
        assert taken <= 1.05 * num_steps


def test_no_draft_is_tried_where_right_ones_would_not_pay() -> None:
    times = StepTimes([1, 2], [1.0, 1.0], [3.0, 1.2], [3.2, 1.4], [0.3, 0.0], [0.3, 0.0])
    lengths, requests = DraftLengths(3, times=times), [make_request(), make_request()]
    assert not any(lengths.next_lengths(requests[:1])[0] for _ in range(300))
    assert any(lengths.next_lengths(requests)), "two requests share the cost"
    assert best_lengths([0.7], 3, *BOUND_BY_LAUNCHES.of(1)) == [0]


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    lengths, request = DraftLengths(5), make_request()
    run(lengths, request, 0.0, 300)
    run(lengths, request, 0.95, LONGEST_WAIT + 40)
    num_drafts, num_tokens = run(lengths, request, 0.95, 100)
    assert num_drafts > 350
    assert num_tokens > 350


def test_a_drafter_that_finds_nothing_is_asked_less_often() -> None:
    lengths, request = DraftLengths(5), make_request()
    asked = [bool(lengths.next_lengths([request])[0]) for _ in range(200)]
    assert all(asked[:PATIENCE])
    assert sum(asked[100:]) <= 5
    lengths = DraftLengths(5)
    for n in range(100):  # and one that finds something at times is asked always
        assert lengths.next_lengths([request])[0] > 0
        if n % PATIENCE == 0:
            lengths.count(request, 5, 4)


def test_each_request_has_its_own_estimate_and_adaptation_can_be_turned_off() -> None:
    lengths, good, bad = DraftLengths(5), make_request(), make_request()
    run(lengths, good, 1.0, 50)
    run(lengths, bad, 0.0, 50)
    assert lengths.next_lengths([good])[0] == 5
    assert lengths.next_lengths([bad])[0] <= 1
    constant = DraftLengths(3, is_adaptive=False)
    assert run(constant, bad, 0.0, 50)[0] == 150
