"""Who gives way when memory runs out, who gets it, and what becomes of whoever gave way."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from shared.engine.draw import Drawn

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.output import StepOutput
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request, RequestStatus
from shared.loading.config_json import parse_config
from shared.sampling.params import SamplingParams
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.preemption import PreemptiveScheduler
from shared.scheduling.scheduler import Schedule, Scheduler
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

MAX_SEQ_LEN = 48
LETTER = 70  # a token of text


class TokenPool:
    """Memory for so many tokens, any of which serves any request: blocks of one token, without the memory."""

    def __init__(self, capacity: int, watermark: int = 0) -> None:
        self.capacity_tokens = self.request_capacity = capacity
        self.watermark_tokens = watermark
        self.granted: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - sum(self.granted.values())

    @property
    def used_tokens(self) -> int:
        return sum(self.lengths.values())

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        held = self.granted.get(request_id, 0)
        if num_tokens - held > self.free_tokens:
            return False
        self.granted[request_id] = max(held, num_tokens)
        self.lengths.setdefault(request_id, 0)
        return True

    def advance(self, request_id: str, num_tokens: int) -> None:
        self.lengths[request_id] += num_tokens
        assert self.lengths[request_id] <= self.granted[request_id]

    def release(self, request_id: str) -> None:
        self.granted.pop(request_id, None)
        self.lengths.pop(request_id, None)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoints["llama"])


def make(tokenizer: Tokenizer, capacity: int, watermark: int = 0, **config: object) -> PreemptiveScheduler:
    return PreemptiveScheduler(EngineConfig(**config), TokenPool(capacity, watermark), tokenizer, MAX_SEQ_LEN)


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, max_new_tokens: int = 5) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    request = Request(name, [5] * num_prompt_tokens, params, 0)
    scheduler.check(name, num_prompt_tokens, params)
    scheduler.add(request)
    return request


def commit(scheduler: Scheduler, schedule: Schedule) -> list[StepOutput]:
    """Every request's token is the letter behind its last one, so an answer shows a token that is lost."""
    outputs = []
    for part in (schedule.prefill, schedule.decode):
        outputs += scheduler.commit(part, Drawn([LETTER + len(request.output_ids) for request in part]))
    return outputs


def names(requests: Sequence[Request]) -> str:
    return "".join(request.request_id for request in requests)


def drawing(scheduler: Scheduler, num_steps: int) -> list[str]:
    """What each step preempts, prefills and decodes, as "preempted|prompts|tokens"."""
    steps = []
    for _ in range(num_steps):
        schedule = scheduler.schedule()
        steps.append(f"{''.join(schedule.preempted)}|{names(schedule.prefill)}|{names(schedule.decode)}")
        commit(scheduler, schedule)
    return steps


# Who gets memory, and from whom.


def test_admission_asks_for_what_there_is_and_decoding_for_one_token_more(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 30)
    add(scheduler, "a", 3)
    add(scheduler, "b", 5)
    granted = []
    for _ in range(3):
        schedule = scheduler.schedule()
        granted.append(dict(scheduler.pool.granted))
        commit(scheduler, schedule)
    assert granted == [{"a": 3, "b": 5}, {"a": 4, "b": 6}, {"a": 5, "b": 7}]


def test_the_youngest_gives_way_to_the_oldest(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 11)
    for name in "abc":
        add(scheduler, name, 3)
    # 9 tokens of 11: in the second step a and b get one each, and c, the youngest, has none to get.
    assert drawing(scheduler, 2) == ["|abc|", "c||ab"]
    assert scheduler.pool.granted == {"a": 4, "b": 4}


def test_as_many_give_way_as_must_the_youngest_first(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 4)
    for name in "abcd":
        add(scheduler, name, 1, max_new_tokens=3)
    assert drawing(scheduler, 2) == ["|abcd|", "dc||ab"]


def test_the_one_that_asks_may_be_the_youngest(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 7)
    add(scheduler, "a", 3, max_new_tokens=4)
    add(scheduler, "b", 3, max_new_tokens=4)
    assert drawing(scheduler, 2) == ["|ab|", "b||a"]
    assert scheduler.pool.granted == {"a": 4}


def test_a_prompt_that_was_admitted_and_not_yet_run_is_the_youngest_too(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 9, max_num_batched_tokens=4)
    for name in "abc":
        add(scheduler, name, 3, max_new_tokens=6)
    # A step has room for one prompt. b is run while a writes; c, which is not run yet, has memory that a needs.
    assert drawing(scheduler, 2) == ["|a|", "c|b|a"]
    assert scheduler.waiting["c"].status is RequestStatus.PREEMPTED


def test_nobody_gives_way_while_there_is_room(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 14)
    for name in "ab":
        add(scheduler, name, 3, max_new_tokens=5)
    assert drawing(scheduler, 5) == ["|ab|", "||ab", "||ab", "||ab", "||ab"], "the last token is never written"
    assert (scheduler.num_preemptions, scheduler.has_work()) == (0, False)


# What becomes of whoever gave way.


def preempted(tokenizer: Tokenizer) -> tuple[PreemptiveScheduler, Request]:
    """a and b run and have two tokens each; c came and waits; then b gave way."""
    scheduler = make(tokenizer, 9, max_batch_size=2)
    add(scheduler, "a", 3, max_new_tokens=6)
    b = add(scheduler, "b", 3, max_new_tokens=4)
    assert drawing(scheduler, 2) == ["|ab|", "||ab"]
    add(scheduler, "c", 1)
    commit(scheduler, scheduler.schedule())
    return scheduler, b


def test_it_holds_nothing_and_keeps_its_tokens(tokenizer: Tokenizer) -> None:
    scheduler, b = preempted(tokenizer)
    assert (b.status, b.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert b.output_ids == [LETTER, LETTER + 1]
    assert scheduler.pool.granted == {"a": 5}
    assert list(scheduler.running) == ["a"]
    assert scheduler.num_preemptions == EngineLoad.of(scheduler).num_preemptions == 1


def test_it_waits_before_all_who_came_later(tokenizer: Tokenizer) -> None:
    scheduler, _ = preempted(tokenizer)
    assert list(scheduler.waiting) == ["b", "c"]
    assert "b" in scheduler
    scheduler = make(tokenizer, 4, max_batch_size=4)
    for name in "abcde":
        add(scheduler, name, 1, max_new_tokens=3)
    drawing(scheduler, 2)
    assert list(scheduler.waiting) == ["c", "d", "e"], "two gave way, d before c"


def test_it_is_computed_anew_prompt_and_answer_in_one_forward(tokenizer: Tokenizer) -> None:
    scheduler, b = preempted(tokenizer)
    # a has 5 tokens and ends with 9, of which the last is not written: then there is room for the 5 of b.
    assert drawing(scheduler, 3) == ["||a", "||a", "||a"]
    schedule = scheduler.schedule()
    assert names(schedule.prefill) == "bc"
    batch = Batch.of([b])
    assert batch.token_ids.tolist() == [5, 5, 5, LETTER, LETTER + 1]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert (batch.sampling_rows[0].index, batch.logit_rows.tolist()) == (2, [4])
    outputs = commit(scheduler, schedule)
    assert (outputs[0].request_id, outputs[0].token_id, b.status) == ("b", LETTER + 2, RequestStatus.DECODE)
    assert StepRecord.of(scheduler, schedule, outputs).prefilled == (("b", 5), ("c", 1))


@pytest.mark.parametrize("has_stop", [False, True])
def test_its_answer_goes_on_as_if_nothing_had_been(tokenizer: Tokenizer, has_stop: bool) -> None:
    """The stop string begins with the last token before the preemption and ends with the first behind it."""
    answers = []
    stop = (tokenizer.decode([LETTER + 1, LETTER + 2]),) if has_stop else ()
    for capacity in (9, 100):
        scheduler = make(tokenizer, capacity)
        scheduler.add(Request("a", [5] * 3, SamplingParams(max_new_tokens=6, ignore_eos=True), 0))
        scheduler.add(Request("b", [5] * 3, SamplingParams(max_new_tokens=4, ignore_eos=True, stop=stop), 0))
        outputs = []
        for _ in range(20):
            outputs += [output for output in commit(scheduler, scheduler.schedule()) if output.request_id == "b"]
        answers.append(outputs)
        assert scheduler.num_preemptions == (1 if capacity == 9 else 0)
    assert answers[0] == answers[1]
    assert [output.token_id for output in answers[0]] == [LETTER + n for n in range(3 if has_stop else 4)]
    assert answers[0][-1].finish_reason is (FinishReason.STOP if has_stop else FinishReason.LENGTH)


def test_a_preempted_request_can_be_aborted(tokenizer: Tokenizer) -> None:
    scheduler, b = preempted(tokenizer)
    assert scheduler.abort("b")
    assert not scheduler.abort("b")
    assert b.status is RequestStatus.FINISHED
    assert (list(scheduler.waiting), set(scheduler.streams)) == (["c"], {"a", "c"})


# Who is let in.


def test_nobody_is_admitted_in_a_step_in_which_somebody_had_to_leave(tokenizer: Tokenizer) -> None:
    """Not even where more came free than was taken."""

    class GrowingPool(TokenPool):
        def release(self, request_id: str) -> None:
            super().release(request_id)
            self.capacity_tokens += 10

    scheduler = make(tokenizer, 11, max_batch_size=3)
    scheduler.pool = GrowingPool(11)
    for name in "abcd":
        add(scheduler, name, 3)
    assert drawing(scheduler, 3) == ["|abc|", "c||ab", "|c|ab"]


def test_admission_leaves_the_watermark_to_those_who_run(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 10, watermark=3)
    add(scheduler, "a", 4, max_new_tokens=2)
    add(scheduler, "b", 4, max_new_tokens=2)
    # Beside a there are 6 free and b wants 4: 2 would be left.
    assert drawing(scheduler, 4) == ["|a|", "||a", "|b|", "||b"]
    scheduler = make(tokenizer, 11, watermark=3)
    add(scheduler, "a", 4, max_new_tokens=2)
    add(scheduler, "b", 4, max_new_tokens=2)
    assert drawing(scheduler, 2) == ["|ab|", "||ab"], "of the watermark those who run may take"


def test_while_nobody_runs_there_is_no_watermark(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 10, watermark=10)
    add(scheduler, "a", 9, max_new_tokens=1)
    add(scheduler, "b", 1, max_new_tokens=1)
    assert drawing(scheduler, 2) == ["|a|", "|b|"]


def test_nobody_overtakes_one_that_has_no_room(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 10)
    add(scheduler, "a", 6, max_new_tokens=2)
    add(scheduler, "b", 5, max_new_tokens=1)
    add(scheduler, "c", 1, max_new_tokens=1)
    assert drawing(scheduler, 3) == ["|a|", "||a", "|bc|"]


# From the first to the last.


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
@pytest.mark.parametrize("watermark", [0, 2])
def test_through_storms_the_order_of_arrival_is_kept(tokenizer: Tokenizer, policy: str, watermark: int) -> None:
    """Each of twelve could fill the memory alone, so they take it from each other all the time."""
    scheduler = make(tokenizer, 24, watermark, scheduler_policy=policy, max_decode_interval=3)
    requests = [add(scheduler, str(n), 1 + n % 3, max_new_tokens=24 - (1 + n % 3)) for n in range(12)]
    ended: list[int] = []
    steps = 0
    while scheduler.has_work():
        steps += 1
        assert steps < 2000, "nobody's turn comes any more"
        oldest = next(iter({**scheduler.running, **scheduler.waiting}))
        schedule = scheduler.schedule()
        assert oldest in scheduler.running
        assert oldest not in schedule.preempted
        assert [*map(int, (*scheduler.running, *scheduler.waiting))] == [n for n in range(12) if n not in ended]
        assert scheduler.pool.free_tokens >= 0
        ended += [int(o.request_id) for o in commit(scheduler, schedule) if o.finish_reason is not None]
    assert scheduler.num_preemptions >= 12
    assert all(request.output_ids == [LETTER + n for n in range(len(request.output_ids))] for request in requests)
    assert all(request.num_tokens == 24 for request in requests)
    assert scheduler.pool.granted == {}
    assert not scheduler.streams


def test_a_step_that_was_broken_off_is_planned_again_without_whom_it_preempted(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, 11, max_batch_size=3)
    for name in "abc":
        add(scheduler, name, 3)
    drawing(scheduler, 1)
    broken_off = scheduler.schedule()
    again = scheduler.schedule()
    assert (broken_off.preempted, again.preempted) == (("c",), ())
    assert names(broken_off.decode) == names(again.decode) == "ab"
    assert scheduler.pool.granted == {"a": 4, "b": 4}
    assert scheduler.num_preemptions == 1


SHAPE = parse_config(SHAPES["tiny-llama"])


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_regions_are_scheduled_as_without_preemption(tokenizer: Tokenizer, policy: str) -> None:
    config = EngineConfig(scheduler_policy=policy, max_decode_interval=2, max_num_batched_tokens=9)
    plans = []
    for scheduler_class in (ContinuousScheduler, PreemptiveScheduler):
        pool = ContiguousKVCachePool(SHAPE, 3, MAX_SEQ_LEN, torch.float32)
        scheduler = scheduler_class(config, pool, tokenizer, MAX_SEQ_LEN)
        for n in range(9):
            add(scheduler, str(n), 1 + 4 * n, max_new_tokens=1 + 7 * n % 5)
        plans.append(drawing(scheduler, 40))
        assert (scheduler.num_preemptions, scheduler.has_work()) == (0, False)
    assert plans[0] == plans[1]
