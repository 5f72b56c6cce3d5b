"""Scheduling over random arrivals: order, budgets, fairness, and that every request finishes."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.static import StaticScheduler
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer
from tests.unit.scheduling_loop import LETTER, Loop

MAX_SEQ_LEN = 48
SCHEDULERS = {"static": StaticScheduler, "continuous": ContinuousScheduler}


def make(
    tokenizer: Tokenizer,
    mode: str = "continuous",
    num_in_flight: int = 0,
    **config: object,
) -> Loop:
    """Every token of every answer is the same letter."""
    settings_ = EngineConfig(batching_mode=mode, **config)
    pool = ContiguousKVCachePool(settings_.max_batch_size, MAX_SEQ_LEN)
    scheduler = SCHEDULERS[mode](settings_, pool, MAX_SEQ_LEN)
    return Loop(scheduler, tokenizer, lambda request, index: LETTER, num_in_flight)


# What each scheduler does, step by step.


def add_abc(loop: Loop) -> None:
    """Two places; a ends after 2 tokens, b after 5, c after 2."""
    for name, tokens in (("a", 2), ("b", 5), ("c", 2)):
        loop.add_new(name, max_new_tokens=tokens)


def test_a_static_batch_runs_until_its_last_answer_ends(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, "static", max_batch_size=2)
    add_abc(loop)
    loop.check_steps(["|ab|", "||ab", "||b", "||b", "||b", "|c|", "||c", "||"])


def test_continuous_batching_fills_a_row_in_the_next_step(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_batch_size=2)
    add_abc(loop)
    loop.check_steps(["|ab|", "||ab", "|c|b", "||bc", "||b", "||"])


def test_a_request_that_waits_is_aborted_too(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_batch_size=2)
    add_abc(loop)
    loop.steps(1)
    assert loop.abort("c")
    assert not loop.abort("c")
    assert loop.steps(5) == ["||ab", "||b", "||b", "||b", "||"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["|ab|", "|c|ab", "|d|abc", "|e|abcd", "|f|abcde", "||abcdef", "||abcdef"]),
        ("prefill_first", ["|ab|", "|c|", "|d|", "|e|abcd", "|f|", "||abcdef", "||abcdef"]),
        ("decode_round_robin", ["|a|", "|b|a", "|c|a", "|d|b", "|e|ac", "|f|bd", "||abcdef"]),
    ],
)
def test_policies_differ_in_decoding_beside_prompts(tokenizer: Tokenizer, policy: str, expected: list[str]) -> None:
    """The table of shared.scheduling.policies: prompts of 6, 4, and then 10 tokens a piece, a budget of 10, N = 3."""
    loop = make(tokenizer, scheduler_policy=policy, max_decode_interval=3, max_num_batched_tokens=10, max_batch_size=8)
    for name, length in zip("abcdef", (6, 4, 10, 10, 10, 10), strict=True):
        loop.add_new(name, length, max_new_tokens=20)
    loop.check_steps(expected)


# Every arrival, every policy.


@dataclass
class Arrival:
    before_step: int
    num_prompt_tokens: int
    max_new_tokens: int
    ends_at: int | None  # the model's own end, at this token

    @property
    def longest(self) -> int:
        """The tokens that its output may have."""
        return min(self.max_new_tokens, MAX_SEQ_LEN - self.num_prompt_tokens)

    @property
    def length(self) -> int:
        """The tokens of its output."""
        return min(self.longest, self.ends_at or self.longest)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 30),
        st.integers(1, MAX_SEQ_LEN - 1),
        st.integers(1, 20),
        st.none() | st.integers(1, 20),
    ),
    max_size=20,
)


@settings(max_examples=150)
@given(
    arrivals=ARRIVALS,
    limits=st.fixed_dictionaries({"max_batch_size": st.integers(1, 5), "max_num_batched_tokens": st.integers(1, 80)}),
    policy=st.sampled_from(SCHEDULER_POLICIES),
    interval=st.integers(1, 5),
    num_in_flight=st.integers(0, 1),
)
def test_no_row_stays_empty_while_requests_wait(
    tokenizer: Tokenizer,
    arrivals: list[Arrival],
    limits: dict[str, int],
    policy: str,
    interval: int,
    num_in_flight: int,
) -> None:
    """And no step computes a request for nothing, and each request ends in time."""
    loop = make(tokenizer, num_in_flight=num_in_flight, scheduler_policy=policy, max_decode_interval=interval, **limits)
    scheduler, arrivals = loop.scheduler, sorted(arrivals, key=lambda arrival: arrival.before_step)
    eos = min(tokenizer.eos_ids)
    loop.token_at = lambda r, index: eos if arrivals[int(r.request_id)].ends_at == index + 1 else LETTER + index
    num_steps, finished, num_entries = 0, dict[int, int](), Counter[int]()
    while len(finished) < len(arrivals):
        for number, arrival in enumerate(arrivals):
            if arrival.before_step == num_steps:
                loop.add_new(str(number), arrival.num_prompt_tokens, arrival.max_new_tokens)
        num_held = len(scheduler.ending)  # by requests that ended while a step computed them
        schedule = scheduler.schedule()
        assert not scheduler.waiting or len(scheduler.running) + num_held >= limits["max_batch_size"], (
            "a request waits although a row is free"
        )
        loop.in_flight.append(schedule)
        while len(loop.in_flight) > num_in_flight:
            loop.finish(loop.in_flight.popleft())
        outputs = loop.processor.take()
        num_entries.update(int(entry.request.request_id) for entry in schedule)
        finished |= {int(output.request_id): num_steps for output in outputs if output.finish_reason}
        num_steps += 1
        assert num_steps < 10_000, "some request is never served again"
    spent = 0
    for number, arrival in enumerate(arrivals):
        # An end of sequence is seen when its token is there; until then one step more may have been scheduled.
        num_steps_of, most = num_entries[number] - arrival.length, num_in_flight * (arrival.length < arrival.longest)
        assert 0 <= num_steps_of <= most, f"request {number} was in {num_steps_of} steps too many"
        # The requests before it in the queue have so many tokens, each of which comes within an interval.
        spent += 1 + interval * arrival.longest + 2 * num_in_flight
        assert finished[number] <= 30 + spent, f"request {number} ended after step {finished[number]}"


def test_outputs_of_a_step_that_broke_off_are_not_those_of_a_later_request_of_that_id(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    loop.add_new("a")
    loop.finish(loop.scheduler.schedule())  # and no output was taken
    assert loop.abort("a")
    loop.add_new("a", max_new_tokens=1)
    assert [(o.request_id, o.finish_reason) for o in loop.step()[1]] == [("a", FinishReason.LENGTH)]
