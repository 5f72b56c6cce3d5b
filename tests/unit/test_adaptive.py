"""The number of drafts follows the acceptance that was measured."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.speculation.adaptive import LONGEST_WAIT, PATIENCE, DraftLengths, best_length


def make_request() -> Request:
    return Request("a", [1], SamplingParams(), 0)


def run(lengths: DraftLengths, request: Request, rate: float, num_steps: int, seed: int = 0) -> tuple[int, int]:
    """Drafts and tokens of steps in which each draft behind accepted ones is accepted with chance ``rate``."""
    chance, num_drafts, num_tokens = Random(seed), 0, 0
    for _ in range(num_steps):
        length = lengths.next_length(request)
        accepted = 0
        while accepted < length and chance.random() < rate:
            accepted += 1
        if length:
            lengths.count(request, length, accepted)
        num_drafts += length
        num_tokens += 1 + accepted
    return num_drafts, num_tokens


@given(rate=st.floats(0, 1), longest=st.integers(1, 9), cost=st.floats(0.001, 1))
def test_the_best_length_gives_most_tokens_per_time(rate: float, longest: int, cost: float) -> None:
    def speed(length: int) -> float:
        return sum(rate**n for n in range(length + 1)) / (1 + cost * length)

    assert speed(best_length(rate, longest, cost)) == pytest.approx(max(map(speed, range(longest + 1))))


def test_drafts_that_are_accepted_become_more_and_useless_ones_cease() -> None:
    for rate, low, high in ((1.0, 4.9, 5.0), (0.8, 3.0, 4.9), (0.5, 1.0, 3.0), (0.0, 0.0, 0.06)):
        num_drafts, _ = run(DraftLengths(5), make_request(), rate, 1000)
        assert low <= num_drafts / 1000 <= high, rate


def test_useless_drafts_cost_less_than_three_percent_of_a_long_answer() -> None:
    lengths = DraftLengths(5)
    num_drafts, num_tokens = run(lengths, make_request(), 0.0, 500)
    assert num_tokens == 500
    assert num_drafts * lengths.draft_cost < 0.03 * 500


def test_a_text_that_becomes_predictable_is_noticed() -> None:
    lengths, request = DraftLengths(5), make_request()
    run(lengths, request, 0.0, 300)
    run(lengths, request, 0.95, LONGEST_WAIT + 40)
    num_drafts, num_tokens = run(lengths, request, 0.95, 100)
    assert num_drafts > 350
    assert num_tokens > 350


def test_a_drafter_that_finds_nothing_is_asked_less_often() -> None:
    lengths, request = DraftLengths(5), make_request()
    asked = [bool(lengths.next_length(request)) for _ in range(200)]
    assert all(asked[:PATIENCE])
    assert sum(asked[100:]) <= 5
    lengths = DraftLengths(5)
    for n in range(100):  # and one that finds something at times is asked always
        assert lengths.next_length(request) > 0
        if n % PATIENCE == 0:
            lengths.count(request, 5, 4)


def test_each_request_has_its_own_estimate_and_adaptation_can_be_turned_off() -> None:
    lengths, good, bad = DraftLengths(5), make_request(), make_request()
    run(lengths, good, 1.0, 50)
    run(lengths, bad, 0.0, 50)
    assert lengths.next_length(good) == 5
    assert lengths.next_length(bad) <= 1
    constant = DraftLengths(3, is_adaptive=False)
    assert run(constant, bad, 0.0, 50)[0] == 150
