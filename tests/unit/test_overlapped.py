"""A step is planned while one is in flight: what is scheduled then, and what waits."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.growth import preempt
from shared.scheduling.overlapped import OverlappedScheduler, has_block_for_each, must_know_ends
from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.schedule import NextRows, Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.speculative import SpeculativeScheduler
from shared.text.tokenizer import Tokenizer
from shared.tracks.compression.scheduler import CompressingScheduler
from shared.tracks.multi_token.scheduler import MultiTokenScheduler
from shared.tracks.segments.registry import SegmentRegistry
from shared.tracks.segments.scheduler import SegmentScheduler
from tests.comparison import assert_equal
from tests.unit.scheduling_loop import LETTER, Loop, TokenPool

MAX_SEQ_LEN = 48
END = LETTER + 1
Arrival = tuple[int, int, int, bool]
"""The step before which a request comes, the tokens of its prompt, the most of its output, whether it ends before."""


class Make(NamedTuple):
    """Makes loops of a scheduler that plans while a step is in flight, as each of the later phases has one."""

    scheduler: Callable[..., Scheduler]
    tokenizer: Tokenizer

    def __call__(self, capacity: int, num_in_flight: int = 1, **config: Any) -> Loop:
        """Every token is a letter, and the second of a request that ends by a token is its end."""
        scheduler = self.scheduler(EngineConfig(**config), TokenPool(capacity), MAX_SEQ_LEN)
        return Loop(scheduler, self.tokenizer, lambda request, index: LETTER + index, num_in_flight)


SCHEDULERS: dict[str, Callable[..., Scheduler]] = {
    "9": OverlappedScheduler,
    "9.1": lambda *options: SegmentScheduler(*options, SegmentRegistry()),
    "9.2": CompressingScheduler,
    "11": SpeculativeScheduler,
    "11.1": MultiTokenScheduler,
}


@pytest.fixture(params=SCHEDULERS.values(), ids=SCHEDULERS)
def make(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Make:
    return Make(request.param, tokenizer)


def add(loop: Loop, name: str, num_prompt_tokens: int, *, ends: bool = False) -> Request:
    params = SamplingParams(max_new_tokens=5, stop_token_ids=(END,) if ends else (), ignore_eos=not ends)
    return loop.add(Request(name, [5] * num_prompt_tokens, params, 0, (END,) if ends else ()))


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_is_scheduled_that_would_preempt_before_the_ends_are_known(make: Make, ends: bool) -> None:
    """Memory for nine tokens, three of each prompt and two of each output: the third needs a preemption, or an end."""
    loop = make(9)
    a, b = add(loop, "a", 3, ends=ends), add(loop, "b", 3)
    steps = loop.steps(6)
    assert_equal(steps[:3], ["|ab|", "||ab", "||"], "while tokens are in flight and the pool is full, nothing")
    assert_equal(steps[3], "||b" if ends else "b||a", "the step after, when it is known whether a has ended")
    for _ in range(12):
        loop.step()
    assert loop.scheduler.num_preemptions == (0 if ends else 1), "preemptions"
    assert_equal(a.output_ids, [LETTER + n for n in range(2 if ends else 5)], "tokens of a")
    assert_equal(b.output_ids, [LETTER + n for n in range(5)], "tokens of b")
    assert_equal(loop.scheduler.pool.audit(), [], "faults of the pool")


def test_with_room_for_the_next_tokens_nothing_waits(make: Make) -> None:
    loop = make(16)
    for name in "ab":
        add(loop, name, 3)
    assert_equal(loop.steps(6), ["|ab|", "||ab", "||ab", "||ab", "||ab", "||"], "steps, with room for all tokens")


@pytest.mark.parametrize(
    ("num_pending_of_a", "num_free", "expected"),
    [
        pytest.param(1, 2, False, id="room for both"),
        pytest.param(1, 1, True, id="room for one"),
        pytest.param(0, 0, False, id="no room, but every end is known"),
    ],
)
def test_a_request_without_a_token_in_flight_needs_its_room_too(
    num_pending_of_a: int, num_free: int, expected: bool, tokenizer: Tokenizer
) -> None:
    """b decodes in every second step, say, so that no token of it is in flight."""
    scheduler = OverlappedScheduler(EngineConfig(), TokenPool(7 + num_free), MAX_SEQ_LEN)
    for name, num_pending in (("a", num_pending_of_a), ("b", 0)):
        request = Request(name, [5] * 3, SamplingParams(), 0)
        scheduler.add(request)
        scheduler.start(request, 0)
        request.append(LETTER)
        request.num_pending_tokens, request.num_scheduled_tokens = num_pending, 3 + num_pending
        assert scheduler.pool.reserve(request, 4 if name == "a" else 3), "the first tokens were refused"
    what = f"a has {num_pending_of_a} tokens in flight and b none, {num_free} slots are free"
    assert_equal(must_know_ends(scheduler), expected, f"{what}: whether the ends must be known")


def test_a_token_may_have_room_in_a_block_that_is_held_already(tokenizer: Tokenizer) -> None:
    scheduler = OverlappedScheduler(EngineConfig(), PagedKVCachePool(2, 4, 4, MAX_SEQ_LEN), MAX_SEQ_LEN)
    request = Request("a", [5] * 5, SamplingParams(), 0)
    scheduler.add(request)
    scheduler.start(request, 0)
    assert scheduler.pool.reserve(request, 5), "the first tokens were refused"
    request.num_pending_tokens, request.num_scheduled_tokens = 1, 5
    assert_equal(must_know_ends(scheduler), False, "no block is free, and two tokens of a's fit: whether it must wait")


def test_a_request_that_has_reached_its_length_needs_no_room(make: Make) -> None:
    """a ends by its length, so its last token in flight asks for nothing, and b is scheduled alone."""
    loop = make(9)
    loop.add(Request("a", [5] * 3, SamplingParams(max_new_tokens=2, ignore_eos=True), 0))
    add(loop, "b", 3)
    assert_equal(loop.steps(3), ["|ab|", "||ab", "||b"], "steps")


def test_without_a_step_in_flight_it_preempts_as_before(make: Make) -> None:
    loop = make(9, num_in_flight=0)
    for name in "ab":
        add(loop, name, 3)
    assert_equal(loop.steps(4), ["|ab|", "||ab", "b||a", "||a"], "steps")


def test_outputs_are_recomputed_to_the_end_beside_a_request_that_decodes(make: Make) -> None:
    loop = make(60, num_in_flight=0, prefill_chunk_size=4)
    for name in "ab":
        loop.add_new(name, 3, max_new_tokens=12, ignore_eos=True)
    loop.steps(7)
    preempt(loop.scheduler, loop.scheduler.running["b"])
    assert_equal(loop.steps(4), ["|b|a", "|b|a", "|b|a", "||ab"], "steps: b has nine tokens")


class ShortWay(OverlappedScheduler):
    """Counts the steps that are planned by the short way, which makes the columns of a schedule before its entries."""

    num_short = 0

    def schedule(self) -> Schedule:
        schedule = super().schedule()
        self.num_short += "columns" in vars(schedule)
        return schedule


class LongWay(PrefixScheduler):
    """Asks each request each question, also in steps that only decode, and commits them as any others."""

    def schedule(self) -> Schedule:
        waits = not has_block_for_each(self) and must_know_ends(self)
        return Schedule(self.num_steps) if waits else super().schedule()


def arrays(part: Any) -> dict[str, Any]:
    """The fields of a batch, or of a layout, those that are arrays as lists."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def planned(loop: Loop) -> tuple[Any, ...]:
    """What the next step computes, with its batch, and the counts of its requests."""
    schedule = loop.scheduler.schedule()
    loop.in_flight.append(schedule)
    entries = [(entry.request.request_id, *entry[1:]) for entry in schedule]
    counts = [
        (r.num_scheduled_tokens, r.num_pending_tokens, r.num_computed_tokens, r.last_step) for r in schedule.requests
    ]
    shown = schedule.step, entries, schedule.num_decoding, schedule.preempted, counts
    if not schedule:
        return shown
    batch = Batch.of(schedule, loop.scheduler.pool)
    return *shown, arrays(batch) | {"layout": arrays(batch.layout)}


def rows_of_newest(loop: Loop) -> list[tuple[Any, ...]]:
    """The sampling rows of the newest step, if all steps before it are committed."""
    if len(loop.in_flight) != 1:
        return []
    schedule = loop.in_flight[0]
    rows = schedule.sampling_rows()
    expected = [entry.request.sampling_row() for entry in schedule if entry.num_logit_rows]
    assert_equal([*rows], expected, "rows, as the requests make them")
    assert_equal(rows[-1:], expected[-1:], "the last row")
    if isinstance(rows, NextRows):
        assert_equal(rows.run.adjusts_logits, any(row.adjusts_logits for row in expected), "whether a row adjusts")
        indices = (rows.run.indices + rows.num_after).tolist()
        assert_equal(indices, [row.index for row in expected], "the indices of the rows")
    return [(row.index, row.output_ids[:], row.serial) for row in rows]


def redirected_at_four(row: SamplingRow) -> SamplingRow:
    """As a budget of thinking tokens: it changes one row, and none before it."""
    return row._replace(redirect=(LETTER, None)) if row.index == 4 else row


def compare(
    tokenizer: Tokenizer, arrivals: list[Arrival], aborts: dict[int, int], num_blocks: int, num_in_flight: int
) -> int:
    """Run both ways beside each other, which must plan the same; returns how often the short one was taken.

    Each request has tokens of its own, and the longest reach the maximum length.
    """

    def token_at(request: Request, index: int) -> int:
        return END if index == 3 and request.end_ids else LETTER + 20 * int(request.request_id) + index

    loops: list[Any] = []
    config = EngineConfig(max_batch_size=3, block_size=4, prefill_chunk_size=5)
    for scheduler in (ShortWay, LongWay):
        pool = PagedKVCachePool.of(PagedSizes(num_blocks, 4, 3, 64, 16), PrefixSharing(4))
        loops.append(Loop(scheduler(config, pool, 16), tokenizer, token_at, num_in_flight))
    to_come = sorted(enumerate(arrivals), key=lambda each: each[1][0])
    for step in range(150):
        while to_come and to_come[0][1][0] <= step:
            number, (_, num_prompt_tokens, most, ends) = to_come.pop(0)
            for loop in loops:
                ids = (END,) if ends else ()
                least = min(2, most)
                settings: dict[str, Any] = {"min_tokens": least}
                settings |= {"presence_penalty": 1.0, "logprobs": 0} if number % 2 else {}
                params = SamplingParams(max_new_tokens=most, stop_token_ids=ids, ignore_eos=True, **settings)
                limit = redirected_at_four if number % 3 == 2 else None
                prompt = [5 + number // 2] * num_prompt_tokens
                loop.add(Request(str(number), prompt, params, 0, ids, limit_row=limit))
        if step in aborts:
            got, expected = (loop.abort(str(aborts[step])) for loop in loops)
            assert got == expected, f"step {step} aborts a request"
        short, long = map(planned, loops)
        assert_equal(short, long, f"what step {step} computes")
        for loop in loops:
            while len(loop.in_flight) > max(num_in_flight, 1):
                loop.finish(loop.in_flight.popleft())
        short, long = ([row[:2] for row in rows_of_newest(loop)] for loop in loops)
        assert_equal(short, long, f"the rows that step {step} samples")
        for loop in loops:
            while len(loop.in_flight) > num_in_flight:
                loop.finish(loop.in_flight.popleft())
        short, long = (
            (loop.processor.take(), loop.scheduler.pool.audit(), sorted(r.request_id for r in loop.scheduler.pool.rows))
            for loop in loops
        )
        assert_equal(short, long, f"outputs of step {step}, and memory after it")
        if not to_come and not any(loop.has_work() for loop in loops):
            break
    assert not any(loop.scheduler.has_work() for loop in loops), "all requests end"
    assert [loop.scheduler.pool.audit() for loop in loops] == [[], []], "what has ended holds nothing"
    return loops[0].scheduler.num_short


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(1, 12), st.booleans()), max_size=7),
    aborts=st.dictionaries(st.integers(0, 30), st.integers(0, 6), max_size=2),
    num_blocks=st.integers(4, 20),
    num_in_flight=st.integers(0, 2),
)
@settings(max_examples=50)
def test_a_step_that_only_decodes_is_that_of_the_long_way(
    tokenizer: Tokenizer,
    arrivals: list[Arrival],
    aborts: dict[int, int],
    num_blocks: int,
    num_in_flight: int,
) -> None:
    """The same schedules, batches and blocks, whatever arrives, ends, is aborted or preempted, and when."""
    compare(tokenizer, arrivals, aborts, num_blocks, num_in_flight)


def test_the_short_way_is_taken_where_nothing_arrives(tokenizer: Tokenizer) -> None:
    """Three requests of twelve tokens, the first of which is that of the prompt's step."""
    num_short = compare(tokenizer, [(0, 3, 12, False)] * 3, {}, 20, 1)
    assert_equal(num_short, 11, "steps")
