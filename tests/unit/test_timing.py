"""Timing of one answer, on engines whose speed is known."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import Run, Steps, SyntheticPrompts, answer_with, rotated, run, timed, torch_threads


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
    found = run(SleepingEngine(first=0.2, later=0.01), [1, 2, 3], 6)
    assert found.token_ids == [0, 1, 2, 3, 4, 5]
    assert found.tokens_computed == 3 + 5
    assert found.times[0] >= 0.2
    assert 1 / 0.2 < found.decode_tokens_per_second <= 100
    assert min(found.intervals) >= 0.01
    by_hand = Run(token_ids=[7, 8, 9], times=[1.0, 1.5, 3.0], tokens_computed=5)
    assert (by_hand.decode_tokens_per_second, by_hand.intervals) == (1.0, [0.5, 1.5])


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 2), (0.12, 3)])
def test_a_slow_engine_is_cut_off_but_gives_the_least_number(seconds, most):
    engine = SleepingEngine(first=0.0, later=0.05)
    found = timed(partial(answer_with, engine), [1], 1000, min_decoded=2, max_seconds=seconds)
    assert 2 <= len(found.intervals) <= most
    assert engine.was_closed


def test_turns_rotate_and_prompts_repeat_with_the_seed_alone():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    first, second, third = SyntheticPrompts(50, 3), SyntheticPrompts(50, 3), SyntheticPrompts(50, 4)
    drawn = [first.draw(20), first.draw(20)]
    assert drawn == [second.draw(20), second.draw(20)]
    assert drawn[1] != drawn[0] != third.draw(20)
    assert all(type(token_id) is int and 0 <= token_id < 50 for token_id in drawn[0])


def test_threads_are_given_back_even_after_an_error_and_steps_count_up():
    before = torch.get_num_threads()
    with pytest.raises(KeyError, match=str(before + 1)), torch_threads(before + 1):
        raise KeyError(torch.get_num_threads())
    assert torch.get_num_threads() == before
    seen: list[tuple[str, int, int]] = []
    steps = Steps(lambda *step: seen.append(step), 2)
    for what in ("load", "measure"):
        with steps.step(what):
            pass
    assert seen == [("load", 0, 2), ("load", 1, 2), ("measure", 1, 2), ("measure", 2, 2)]
