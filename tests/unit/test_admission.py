"""Who is let in, in which order, and with how much memory."""

from pathlib import Path

import pytest
import torch
from shared.engine.draw import Drawn

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.request import Request, RequestStatus
from shared.loading.config_json import parse_config
from shared.sampling.params import SamplingParams
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer

SHAPE = parse_config(SHAPES["tiny-llama"])
MAX_SEQ_LEN = 20
LETTER = 70  # a token of text


def pool(num_regions: int) -> ContiguousKVCachePool:
    return ContiguousKVCachePool(SHAPE, num_regions, MAX_SEQ_LEN, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoints["llama"])


def static(tokenizer: Tokenizer, num_regions: int, **config: object) -> Scheduler:
    return StaticScheduler(EngineConfig(batching_mode="static", **config), pool(num_regions), tokenizer, MAX_SEQ_LEN)


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int = 3, max_new_tokens: int = 4) -> Request:
    request = Request(name, [5] * num_prompt_tokens, SamplingParams(max_new_tokens=max_new_tokens), 0)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> list[StepOutput]:
    schedule = scheduler.schedule()
    outputs = scheduler.commit(schedule.prefill, Drawn([LETTER] * len(schedule.prefill)))
    return outputs + scheduler.commit(schedule.decode, Drawn([LETTER] * len(schedule.decode)))


# The pool.


def test_regions_are_granted_until_there_are_none() -> None:
    regions = pool(2)
    assert regions.reserve("a", 5)
    assert regions.reserve("b", 5)
    before = regions.audit()
    assert regions.reserve("c", 1) is False
    assert regions.audit() == before, "a refusal changes nothing"
    assert regions.free_tokens == 0
    regions.release("a")
    assert regions.reserve("c", 1) is True
    assert sorted(regions.places(["b", "c"])[0].tolist()) == [0, 1], "each has one, and no two the same"


def test_a_request_keeps_its_region_and_what_it_was_granted() -> None:
    regions = pool(3)
    assert regions.reserve("a", 7)
    regions.advance("a", 6)
    before = regions.audit()
    assert regions.reserve("a", 2)
    assert regions.audit() == before, "the same region, and nothing taken back"
    assert regions.reserve("a", 9)
    regions.advance("a", 3)
    assert regions.free_tokens == 2 * MAX_SEQ_LEN


# The queue.


def test_as_many_run_as_may_and_those_who_came_first(tokenizer: Tokenizer) -> None:
    scheduler = static(tokenizer, 5, max_batch_size=3)
    requests = [add(scheduler, name) for name in "abcde"]
    step(scheduler)
    assert (list(scheduler.running), list(scheduler.waiting)) == (["a", "b", "c"], ["d", "e"])
    assert set(scheduler.streams) == set("abcde")
    assert [r.status for r in requests] == [RequestStatus.DECODE] * 3 + [RequestStatus.WAITING] * 2


def test_whom_memory_refuses_waits_and_nobody_overtakes(tokenizer: Tokenizer) -> None:
    scheduler = static(tokenizer, 2, max_batch_size=4)
    for name in "abcd":
        add(scheduler, name, max_new_tokens=2)
    step(scheduler)
    assert (list(scheduler.running), list(scheduler.waiting)) == (["a", "b"], ["c", "d"])
    assert scheduler.waiting["c"].status is RequestStatus.WAITING
    step(scheduler)
    step(scheduler)
    assert (list(scheduler.running), list(scheduler.waiting)) == (["c", "d"], [])


@pytest.mark.parametrize(("max_new_tokens", "granted"), [(1, 4), (9, 12), (500, MAX_SEQ_LEN)])
def test_a_request_is_granted_memory_for_its_longest_answer(
    tokenizer: Tokenizer, max_new_tokens: int, granted: int
) -> None:
    scheduler = static(tokenizer, 1)
    add(scheduler, "a", 3, max_new_tokens)
    scheduler.schedule()
    assert scheduler.pool.audit() == [f"Request a holds region 0 with 0 tokens of {granted} granted."]
