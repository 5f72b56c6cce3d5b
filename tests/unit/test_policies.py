"""Which requests decode in a step with prefills, under each policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.config import SCHEDULER_POLICIES
from shared.scheduling.policies import POLICIES, in_turn, when_due
from tests.comparison import assert_equal


@pytest.mark.parametrize(
    ("steps_since", "turns"),
    [
        ([], []),
        ([1], [False]),
        ([1, 2, 1], [False] * 3),
        ([1, 3, 1], [True] * 3),
        ([3, 1], [True] * 2),
        ([7, 1], [True] * 2),
    ],
)
def test_prefill_first_decodes_all_when_one_is_due(steps_since: list[int], turns: list[bool]) -> None:
    assert_equal(when_due(steps_since, 3), turns, f"who decodes after {steps_since} steps, interval 3", ("request",))


@pytest.mark.parametrize(
    ("steps_since", "turns"),
    [
        ([], []),
        ([1], [True]),  # a third of one, rounded up
        ([1, 1, 1], [True, False, False]),
        ([1, 2, 1], [False, True, False]),
        ([2, 1, 2, 2], [True, False, True, False]),  # two of four; of equals the first
        ([1, 3, 3, 3], [False, True, True, True]),  # above the share, since all three are due
        ([9, 1, 1], [True, False, False]),
    ],
)
def test_round_robin_takes_an_even_share_of_those_that_waited_longest(
    steps_since: list[int], turns: list[bool]
) -> None:
    assert_equal(in_turn(steps_since, 3), turns, f"who decodes after {steps_since} steps, interval 3", ("request",))


@given(count=st.integers(1, 20), interval=st.integers(1, 6))
def test_round_robin_comes_to_each_in_time_and_to_few_at_once(count: int, interval: int) -> None:
    steps_since = [1] * count
    for _ in range(5 * interval):
        turns = in_turn(steps_since, interval)
        assert_equal(sum(turns), -(-count // interval), f"decoding of {count}, interval {interval}")
        steps_since = [1 if has_turn else steps + 1 for has_turn, steps in zip(turns, steps_since, strict=True)]
        assert max(steps_since) <= interval, f"a request has waited {max(steps_since)} steps, interval {interval}"


@given(
    steps_since=st.lists(st.integers(1, 9), max_size=12),
    interval=st.integers(1, 6),
    policy=st.sampled_from(SCHEDULER_POLICIES),
)
def test_a_request_that_is_due_decodes(steps_since: list[int], interval: int, policy: str) -> None:
    turns = POLICIES[policy].turns(steps_since, interval)
    served, left = ([n for has, n in zip(turns, steps_since, strict=True) if has is x] for x in (True, False))
    assert not left or max(left) < interval
    if policy == "fcfs":
        assert not left
    if policy == "decode_round_robin":
        assert len(served) >= len(steps_since) / interval
        assert not left or min(served, default=0) >= max(left), "those that have waited longest"


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_without_prompts_all_decode(policy: str) -> None:
    assert POLICIES[policy].share("abc", [], [1, 2, 1], 3) == ("abc", [])


@pytest.mark.parametrize(
    ("policy", "shared"),
    [("fcfs", (["a", "b", "c"], "xyz")), ("prefill_first", ([], "xyz")), ("decode_round_robin", (["b"], "x"))],
)
def test_beside_prompts_a_policy_says_what_takes_part(policy: str, shared: tuple[list[str], str]) -> None:
    assert POLICIES[policy].share("abc", "xyz", [1, 2, 1], 3) == shared
