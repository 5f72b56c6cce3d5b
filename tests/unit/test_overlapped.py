"""A step is planned while one is in flight: what is scheduled then, and what waits."""

from pathlib import Path

import pytest

from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.scheduling.overlapped import OverlappedScheduler
from shared.scheduling.schedule import Schedule
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_equal
from tests.unit.scheduling_loop import Loop, names
from tests.unit.test_preemption import LETTER, MAX_SEQ_LEN, TokenPool

END = LETTER + 1


def make(folder: Path, capacity: int, num_in_flight: int = 1) -> Loop:
    """Every token is a letter, and the second of a request that ends by a token is its end."""
    scheduler = OverlappedScheduler(EngineConfig(), TokenPool(capacity), MAX_SEQ_LEN)
    return Loop(scheduler, Tokenizer.load(folder), lambda request, index: LETTER + index, num_in_flight)


def add(loop: Loop, name: str, num_prompt_tokens: int, *, ends: bool = False) -> Request:
    params = SamplingParams(max_new_tokens=5, stop_token_ids=(END,) if ends else (), ignore_eos=not ends)
    return loop.add(Request(name, [5] * num_prompt_tokens, params, 0, (END,) if ends else ()))


def shown(schedule: Schedule) -> str:
    return f"{''.join(schedule.preempted)}|{names(schedule.prompts)}|{names(schedule.decoding)}"


def run(loop: Loop, num_steps: int) -> list[str]:
    return [shown(loop.step()[0]) for _ in range(num_steps)]


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_is_scheduled_that_would_preempt_before_the_ends_are_known(
    tiny_checkpoints: dict[str, Path], ends: bool
) -> None:
    """Memory for nine tokens, three of each prompt and two of each output: the third needs a preemption, or an end."""
    loop = make(tiny_checkpoints["llama"], 9)
    a, b = add(loop, "a", 3, ends=ends), add(loop, "b", 3)
    steps = run(loop, 6)
    assert_equal(steps[:3], ["|ab|", "||ab", "||"], "while tokens are in flight and the pool is full, nothing")
    assert_equal(steps[3], "||b" if ends else "b||a", "the step after, when it is known whether a has ended")
    for _ in range(12):
        loop.step()
    assert loop.scheduler.num_preemptions == (0 if ends else 1), "preemptions"
    assert_equal(a.output_ids, [LETTER + n for n in range(2 if ends else 5)], "tokens of a")
    assert_equal(b.output_ids, [LETTER + n for n in range(5)], "tokens of b")
    assert_equal(loop.scheduler.pool.audit(), [], "faults of the pool")


def test_with_room_for_the_next_tokens_nothing_waits(tiny_checkpoints: dict[str, Path]) -> None:
    loop = make(tiny_checkpoints["llama"], 16)
    for name in "ab":
        add(loop, name, 3)
    assert_equal(run(loop, 6), ["|ab|", "||ab", "||ab", "||ab", "||ab", "||"], "steps, with room for all tokens")


def test_a_request_that_has_reached_its_length_needs_no_room(tiny_checkpoints: dict[str, Path]) -> None:
    """a ends by its length, so its last token in flight asks for nothing, and b is scheduled alone."""
    loop = make(tiny_checkpoints["llama"], 9)
    loop.add(Request("a", [5] * 3, SamplingParams(max_new_tokens=2, ignore_eos=True), 0))
    add(loop, "b", 3)
    assert_equal(run(loop, 3), ["|ab|", "||ab", "||b"], "steps")


def test_without_a_step_in_flight_it_preempts_as_before(tiny_checkpoints: dict[str, Path]) -> None:
    loop = make(tiny_checkpoints["llama"], 9, num_in_flight=0)
    for name in "ab":
        add(loop, name, 3)
    assert_equal(run(loop, 4), ["|ab|", "||ab", "b||a", "||a"], "steps")
