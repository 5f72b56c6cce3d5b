"""Timing of one answer, on engines whose speed is known."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import Run, Steps, SyntheticPrompts, rotated, run, torch_threads


class SleepingEngine:
    """Takes ``first`` seconds for the first token and ``later`` for each one after it."""

    def __init__(self, first: float, later: float) -> None:
        self.first, self.later = first, later
        self.computed = 100
        self.was_closed = False

    def stats(self) -> dict[str, int]:
        return {"tokens computed": self.computed}

    def generate(self, prompt_ids, params):
        assert params.is_greedy
        assert params.ignore_eos
        try:
            for index in range(params.max_new_tokens):
                time.sleep(self.later if index else self.first)
                self.computed += len(prompt_ids) if index == 0 else 1
                yield SimpleNamespace(token_id=index)
        finally:
            self.was_closed = True


def test_the_first_token_is_not_part_of_the_decode_speed():
    timed = run(SleepingEngine(first=0.2, later=0.01), [1, 2, 3], 6)
    assert timed.token_ids == [0, 1, 2, 3, 4, 5]
    assert timed.tokens_computed == 3 + 5
    assert timed.times[0] >= 0.2
    assert 1 / 0.2 < timed.decode_tokens_per_second <= 100
    assert len(timed.intervals) == 5
    assert min(timed.intervals) >= 0.01


def test_speed_and_intervals_by_hand():
    timed = Run(token_ids=[7, 8, 9], times=[1.0, 1.5, 3.0], tokens_computed=5)
    assert timed.decode_tokens_per_second == 1.0
    assert timed.intervals == [0.5, 1.5]


def test_a_slow_engine_is_cut_off_but_gives_the_least_number():
    engine = SleepingEngine(first=0.0, later=0.05)
    timed = run(engine, [1], 1000, min_decoded=2, max_seconds=0.0)
    assert len(timed.intervals) == 2
    assert engine.was_closed
    timed = run(engine, [1], 1000, min_decoded=2, max_seconds=0.12)
    assert 2 <= len(timed.intervals) <= 3


def test_turns_rotate():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_prompts_differ_from_each_other_and_repeat_with_the_seed():
    first, second, third = SyntheticPrompts(50, 3), SyntheticPrompts(50, 3), SyntheticPrompts(50, 4)
    drawn = [first.draw(20), first.draw(20)]
    assert drawn == [second.draw(20), second.draw(20)]
    assert drawn[0] != drawn[1]
    assert drawn[0] != third.draw(20)
    assert all(type(token_id) is int and 0 <= token_id < 50 for token_id in drawn[0])


def test_threads_are_given_back_even_after_an_error():
    before = torch.get_num_threads()

    def fail() -> None:
        with torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before
    with torch_threads(None):
        assert torch.get_num_threads() == before


def test_steps_count_up_to_the_total():
    seen: list[tuple[str, int, int]] = []
    steps = Steps(lambda *step: seen.append(step), 2)
    for text in ("load", "measure"):
        with steps.step(text):
            pass
    assert seen == [("load", 0, 2), ("load", 1, 2), ("measure", 1, 2), ("measure", 2, 2)]
