"""The number of drafts follows the acceptance that was measured."""

from itertools import product
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.speculation.adaptive import LONGEST_WAIT, PATIENCE, DraftCosts, DraftLengths, a_tenth, best_lengths


def make_request() -> Request:
    return Request("a", [1], SamplingParams(), 0)


def run(lengths: DraftLengths, request: Request, rate: float, num_steps: int, seed: int = 0) -> tuple[int, int]:
    """Drafts and tokens of steps in which each draft after accepted ones is accepted with chance ``rate``."""
    chance, num_drafts, num_tokens = Random(seed), 0, 0
    for _ in range(num_steps):
        length = lengths.next_lengths([request])[0]
        known = lengths.known.get(request)
        assert known is None or known.num_empty == 0, "each attempt so far was counted"
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
    verifying = plain + overhead + B * row, plain + overhead + longest * B * row
    costs = DraftCosts(plain, *verifying, 1.5 * drafting, drafting)

    def speed(lengths: tuple[int, ...]) -> float:
        num_tokens = sum(rate**n for rate, length in zip(rates, lengths, strict=True) for n in range(length + 1))
        num_drafts = sum(lengths)
        verifying = plain + overhead + max(num_drafts, B) * row if num_drafts else plain
        return num_tokens / (verifying + (max(lengths) + 0.5 * any(lengths)) * drafting)

    choices = product(range(longest + 1), repeat=B)
    assert speed(tuple(best_lengths(rates, longest, costs))) == pytest.approx(max(map(speed, choices)))


def test_where_rows_cost_as_much_as_steps_only_likely_drafts_are_verified() -> None:
    """On a large batch a draft must be likelier than a request's next token is cheap."""
    cheap, dear = DraftCosts(1.0, 1.02, 1.1, 0.0, 0.0), DraftCosts(1.0, 1.9, 5.0, 0.0, 0.0)
    rates = [0.9, 0.5, 0.1]
    assert best_lengths(rates, 5, cheap) == [5, 4, 1]
    assert best_lengths(rates, 5, dear) == [0, 0, 0]
    assert best_lengths([0.98, 0.5, 0.1], 5, DraftCosts(1.0, 1.2, 3.0, 0.0, 0.0))[1:] == [0, 0]


def test_of_equally_likely_drafts_those_of_the_first_request_come_first() -> None:
    assert best_lengths([1.0, 1.0], 2, DraftCosts(1.0, 1.1, 9.0, 0.0, 0.0)) == [2, 0]


def test_drafts_behind_the_first_rejected_one_were_not_judged() -> None:
    lengths, request = DraftLengths(5), make_request()
    lengths.count(request, 5, 1)
    assert lengths.known[request].rate == pytest.approx((0.9 * 1.0 + 1) / (0.9 * 1.5 + 2))


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


def test_drafts_that_are_accepted_become_more_and_useless_ones_cease() -> None:
    for rate, low, high in ((1.0, 4.9, 5.0), (0.8, 3.0, 4.9), (0.5, 1.0, 3.0), (0.0, 0.0, 0.06)):
        num_drafts, _ = run(DraftLengths(5), make_request(), rate, 1000)
        assert low <= num_drafts / 1000 <= high, rate


def spent_on_useless(lengths: DraftLengths, num_tokens: int, num_requests: int = 1) -> tuple[float, int]:
    """What answers cost in plain steps if no draft is accepted, and the attempts, which ask for drafts in a step.

    Where an attempt takes two steps, the first of them has masks alone.
    """
    requests = [make_request() for _ in range(num_requests)]
    taken, num_attempts, num_steps = 0.0, 0, 0
    costs = lengths.costs_of(num_requests, num_requests, lengths.longest)
    while num_steps < num_tokens:
        chosen = lengths.next_lengths(requests)
        if not any(chosen):
            taken, num_steps = taken + costs.plain, num_steps + 1
            continue
        share = (max(sum(chosen), num_requests) - num_requests) / (num_requests * (lengths.longest - 1))
        verifying = costs.short + share * (costs.long - costs.short)
        taken += lengths.attempt_steps * verifying + costs.first + (max(chosen) - 1) * costs.more
        num_steps, num_attempts = num_steps + lengths.attempt_steps, num_attempts + 1
        for request, length in zip(requests, chosen, strict=True):
            if length:
                lengths.count(request, length, 0)
    return taken / costs.plain, num_attempts


BOUND_BY_LAUNCHES = DraftCosts(0.528, 1.292, 1.299, 0.107, 0.107)
"""Milliseconds on an H100 of the demo model's shape, with an adapter."""
OF_STEPS = {
    "a tenth": (a_tenth(1, 0, 5), 1),
    "adapter": (BOUND_BY_LAUNCHES, 2),
    "lookup": (DraftCosts(0.462, 0.992, 0.998, 0.0, 0.0), 1),
    "3B": (DraftCosts(2.50, 3.61, 3.90, 0.176, 0.176), 2),
    "draft model": (DraftCosts(1.0, 1.0, 1.0, 0.3, 0.2), 1),
    "steep": (DraftCosts(1.0, 2.2, 2.2, 0.0, 0.0), 2),
    "free": (DraftCosts(1.0, 1.0001, 1.0005, 0.0, 0.0), 1),
}


@pytest.mark.parametrize(("costs", "attempt_steps"), OF_STEPS.values(), ids=OF_STEPS)
def test_useless_drafts_cost_at_most_three_percent_of_a_long_answer(costs: DraftCosts, attempt_steps: int) -> None:
    for num_tokens in (500, 1000, 4000):
        lengths = DraftLengths(3, costs_of=lambda *_: costs, attempt_steps=attempt_steps)
        taken, num_attempts = spent_on_useless(lengths, num_tokens)
        assert num_attempts >= 2, "it is tried again"
        assert taken <= 1.03 * num_tokens
        assert num_attempts <= 0.04 * num_tokens, "whatever the table says: it may be wrong"


def test_no_draft_is_tried_where_right_ones_would_not_pay() -> None:
    costs = {1: DraftCosts(1.0, 3.0, 3.2, 0.3, 0.3), 2: DraftCosts(1.0, 1.2, 1.4, 0.0, 0.0)}
    lengths = DraftLengths(3, costs_of=lambda num_requests, *_: costs[num_requests])
    requests = [make_request(), make_request()]
    assert not any(lengths.next_lengths(requests[:1])[0] for _ in range(300))
    requests[0].num_certain_drafts = 2
    assert lengths.next_lengths(requests[:1]) == [2], "what is certain is drafted all the same"
    requests[0].num_certain_drafts = 0
    assert any(lengths.next_lengths(requests)), "two requests share the cost"
    assert best_lengths([0.7], 3, BOUND_BY_LAUNCHES) == [0]
    lengths.costs_of = lambda *_: costs[2]
    assert any(lengths.next_lengths(requests[:1])), "the table was replaced"


def test_lengths_follow_the_requests_context() -> None:
    """The longer the context, the less a draft adds to a step."""
    lengths = DraftLengths(3, costs_of=lambda num, context, _: DraftCosts(context, context + 20, context + 21, 0, 0))
    short, long = (Request(name, [1] * length, SamplingParams(), 0) for name, length in (("a", 3), ("b", 60)))
    assert lengths.next_lengths([short]) == [0]
    assert lengths.next_lengths([long]) == [3]
    asked: list[int] = []
    lengths = DraftLengths(3, costs_of=lambda num, context, most: asked.append(context) or a_tenth(num, context, most))
    for size in (1, 2, 3, 64, 65):
        lengths.next_lengths([Request("a", [1] * size, SamplingParams(), 0)])
    assert asked == [1, 2, 4, 64, 128], "the powers of two that the context does not exceed"


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
    assert not all(asked[: 3 * PATIENCE])
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
