"""Which request is preempted when no block is free, and how it is queued, readmitted and recomputed."""

from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request, RequestStatus
from shared.scheduling.growth import preempt
from shared.scheduling.preemptive import PreemptiveScheduler
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_equal
from tests.unit.scheduling_loop import LETTER, Loop, TokenPool, shown

MAX_SEQ_LEN = 48


def make(tokenizer: Tokenizer, capacity: int, num_in_flight: int = 0, watermark: int = 0, **config: object) -> Loop:
    """Every request's token is the letter after its last one, so an answer shows a token that is lost."""
    scheduler = PreemptiveScheduler(EngineConfig(**config), TokenPool(capacity, watermark), MAX_SEQ_LEN)
    return Loop(scheduler, tokenizer, lambda request, index: LETTER + index, num_in_flight)


def add(loop: Loop, name: str, num_prompt_tokens: int, max_new_tokens: int = 5) -> Request:
    return loop.add_new(name, num_prompt_tokens, max_new_tokens, ignore_eos=True)


# Which request is preempted, and for which.


def test_admission_asks_for_what_there_is_and_decoding_for_one_token_more(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, 30)
    add(loop, "a", 3)
    add(loop, "b", 5)
    granted = []
    for _ in range(3):
        loop.step()
        granted.append(loop.scheduler.pool.grants())
    assert_equal(granted, [{"a": 3, "b": 5}, {"a": 4, "b": 6}, {"a": 5, "b": 7}], "tokens granted", ("step", "request"))


def test_the_youngest_is_preempted_for_the_oldest(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, 11)
    for name in "abc":
        add(loop, name, 3)
    # 9 tokens of 11: in the second step a and b get one each, and c, the youngest, has none to get.
    loop.check_steps(["|abc|", "c||ab"])
    assert_equal(loop.scheduler.pool.grants(), {"a": 4, "b": 4}, "tokens granted", ("request",))


def test_as_many_are_preempted_as_needed_the_youngest_first(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, 4)
    for name in "abcd":
        add(loop, name, 1, max_new_tokens=3)
    loop.check_steps(["|abcd|", "dc||ab"])


def test_the_one_that_asks_may_be_the_youngest(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, 7)
    add(loop, "a", 3, max_new_tokens=4)
    add(loop, "b", 3, max_new_tokens=4)
    loop.check_steps(["|ab|", "b||a"])
    assert_equal(loop.scheduler.pool.grants(), {"a": 4}, "tokens granted", ("request",))


# A preempted request.


def preempted(tokenizer: Tokenizer) -> tuple[Loop, Request]:
    """a and b run and have two tokens each, c waits; then b is preempted."""
    loop = make(tokenizer, 9, max_batch_size=2)
    add(loop, "a", 3, max_new_tokens=6)
    b = add(loop, "b", 3, max_new_tokens=4)
    loop.check_steps(["|ab|", "||ab"])
    add(loop, "c", 1)
    loop.step()
    return loop, b


def test_it_holds_nothing_and_keeps_its_tokens(tokenizer: Tokenizer) -> None:
    loop, b = preempted(tokenizer)
    assert_equal((b.status, b.num_computed_tokens), (RequestStatus.PREEMPTED, 0), "status and computed tokens of b")
    assert_equal((b.num_scheduled_tokens, b.num_pending_tokens), (0, 0), "scheduled and pending tokens of b")
    assert_equal(b.output_ids, [LETTER, LETTER + 1], "output of b", ("token",))
    assert_equal(loop.scheduler.pool.grants(), {"a": 5}, "tokens granted", ("request",))
    assert_equal(list(loop.scheduler.running), ["a"], "running", ("place",))
    counted = (loop.scheduler.num_preemptions, EngineLoad.of(loop.scheduler).num_preemptions)
    assert_equal(counted, (1, 1), "preemptions")
    loop = make(tokenizer, 9)
    a = add(loop, "a", 3)
    loop.scheduler.schedule()
    preempt(loop.scheduler, a)
    assert_equal(loop.scheduler.pool.grants(), {}, "tokens granted, nothing of a being computed yet", ("request",))


def test_it_is_queued_before_later_requests(tokenizer: Tokenizer) -> None:
    loop, _ = preempted(tokenizer)
    assert_equal(list(loop.scheduler.waiting), ["b", "c"], "queue", ("place",))
    assert "b" in loop.scheduler, "the scheduler no longer knows b"
    loop = make(tokenizer, 4, max_batch_size=4)
    for name in "abcde":
        add(loop, name, 1, max_new_tokens=3)
    loop.steps(2)
    assert_equal(list(loop.scheduler.waiting), ["c", "d", "e"], "queue: d was preempted before c", ("place",))


def test_it_is_computed_anew_prompt_and_answer_in_one_forward(tokenizer: Tokenizer) -> None:
    loop, b = preempted(tokenizer)
    # a has 5 tokens and ends with 9, of which the last is not written: then there is space for the 5 of b.
    loop.check_steps(["||a", "||a", "||a"])
    schedule = loop.scheduler.schedule()
    assert_equal(shown(schedule), "|bc|", "the next step: preempted|prompts|decoding")
    again = schedule.entries[0]
    assert_equal(
        (again.start, again.num_tokens, schedule.num_decoding), (0, 5, 0), "start, tokens of b, and decoding requests"
    )
    batch = Batch.of(schedule, loop.scheduler.pool).part(range(1))
    assert_equal(batch.token_ids.tolist(), [5, 5, 5, LETTER, LETTER + 1], "token ids of b", ("token",))
    assert_equal(batch.positions.tolist(), [0, 1, 2, 3, 4], "positions of b", ("token",))
    assert_equal(
        (schedule.sampling_rows()[0].index, batch.logit_rows.tolist()),
        (2, [4]),
        "index of the sampled token, and logit rows",
    )
    loop.finish(schedule)
    outputs = loop.processor.take()
    assert_equal(
        (outputs[0].request_id, outputs[0].token_id, b.is_prefilling),
        ("b", LETTER + 2, False),
        "request, token and whether it is still prefilling",
    )
    assert_equal(StepRecord.of(loop.scheduler, schedule, outputs).prefilled, (("b", 5), ("c", 1)), "prefilled")


# Admission.


def test_admission_leaves_the_watermark_to_requests_that_run(tokenizer: Tokenizer) -> None:
    """a runs alone although fewer than five tokens stay free; b comes only where they do."""
    loop = make(tokenizer, 9, watermark=5)
    add(loop, "a", 5, max_new_tokens=2)
    add(loop, "b", 4, max_new_tokens=2)
    assert loop.steps(4) == ["|a|", "||a", "|b|", "||b"]


# With a step in flight.


def test_a_result_from_before_a_preemption_is_dropped_after_the_readmission(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, 20)
    a = add(loop, "a", 3)
    loop.steps(2)
    before = loop.scheduler.schedule()
    preempt(loop.scheduler, a)
    again = loop.scheduler.schedule()
    loop.finish(before)
    found = (a.output_ids, a.num_computed_tokens)
    assert_equal(found, ([LETTER, LETTER + 1], 0), "output and computed tokens, the old step's result dropped")
    loop.finish(again)
    found = (a.output_ids, a.num_computed_tokens)
    assert_equal(found, ([LETTER, LETTER + 1, LETTER + 2], 5), "output and computed tokens, computed anew")


def test_the_token_in_flight_has_room_too(tokenizer: Tokenizer) -> None:
    """As from phase 9 on, where the next step is planned before the last one's tokens are known."""
    loop = make(tokenizer, 20)
    add(loop, "a", 3)
    for in_flight in range(3):
        assert_equal(loop.scheduler.schedule().preempted, (), "preempted", ("request",))
        expected = 3 + in_flight
        assert_equal(
            loop.scheduler.pool.grants(), {"a": expected}, f"tokens granted, {in_flight} in flight", ("request",)
        )
