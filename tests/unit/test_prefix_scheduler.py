"""Who waits for the blocks that another request computes, and what is counted of the prefix tree."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from shared.scheduling.growth import preempt
from shared.scheduling.overlapped import OverlappedScheduler
from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.speculative import SpeculativeScheduler
from shared.text.tokenizer import Tokenizer
from shared.tracks.compression.scheduler import CompressingScheduler
from shared.tracks.multi_token.scheduler import MultiTokenScheduler
from shared.tracks.segments.registry import SegmentRegistry
from shared.tracks.segments.scheduler import SegmentScheduler
from tests.unit.scheduling_loop import LETTER, Loop


def make(
    tokenizer: Tokenizer, num_blocks: int = 30, scheduler: Callable[..., Scheduler] = PrefixScheduler, **config: Any
) -> Loop:
    """Blocks of 4 tokens."""
    pool = PagedKVCachePool.of(PagedSizes(num_blocks, 4, 4, 64, 48), PrefixSharing(4))
    settings = EngineConfig(block_size=4, max_batch_size=4, **config)
    return Loop(scheduler(settings, pool, 48), tokenizer, lambda request, index: LETTER + index)


def add(loop: Loop, name: str, ids: str, max_new_tokens: int = 2, **params: Any) -> Request:
    """A letter is a token."""
    made = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, **params)
    return loop.add(Request(name, [ord(letter) for letter in ids], made, 0))


def test_of_those_that_arrive_together_one_computes_and_the_others_wait(tokenizer: Tokenizer) -> None:
    """c shares nothing and is admitted past b, which is judged after a has been admitted."""
    loop = make(tokenizer)
    a, b, c = add(loop, "a", "abcdefghi"), add(loop, "b", "abcdefghxy"), add(loop, "c", "stuv")
    assert loop.steps(3) == ["|ac|", "|b|ac", "||b"]
    assert [request.num_cached_tokens for request in (a, b, c)] == [0, 8, 0]
    assert (loop.scheduler.num_prefix_queries, loop.scheduler.num_prefix_hits) == (23, 8)


def test_another_takes_over_if_the_first_is_aborted(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, prefill_chunk_size=4)
    for name in "abc":
        add(loop, name, "abcdefghi")
    assert loop.steps(1) == ["|a|"]
    assert loop.abort("a")
    assert loop.steps(3) == ["|b|", "|bc|", "||bc"]


def test_a_request_for_prompt_log_probabilities_neither_waits_nor_finds_nor_counts(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    add(loop, "a", "abcdefghi")
    asking = add(loop, "b", "abcdefghi", prompt_logprobs=0)
    assert loop.steps(1) == ["|ab|"]
    late = add(loop, "c", "abcdefghi", prompt_logprobs=0)
    assert loop.steps(1) == ["|c|ab"]
    assert (asking.num_cached_tokens, late.num_cached_tokens, loop.scheduler.num_prefix_queries) == (0, 0, 9)


@pytest.mark.parametrize(
    "scheduler",
    [
        PrefixScheduler,
        OverlappedScheduler,
        SpeculativeScheduler,
        MultiTokenScheduler,
        CompressingScheduler,
        partial(SegmentScheduler, registry=SegmentRegistry()),
    ],
)
def test_a_request_that_lacks_one_token_when_it_is_admitted_decodes_at_once(
    tokenizer: Tokenizer, scheduler: Callable[..., Scheduler]
) -> None:
    loop = make(tokenizer, scheduler=scheduler)
    request = add(loop, "a", "abcdefgh", max_new_tokens=9)
    assert loop.steps(1) == ["|a|"]
    preempt(loop.scheduler, request)
    assert loop.steps(2) == ["||a", "||a"]


def test_a_readmitted_request_finds_itself_and_keeps_its_first_count(tokenizer: Tokenizer) -> None:
    """b is preempted with two blocks of its own in the tree, and outputs, which are queried again."""
    loop = make(tokenizer, num_blocks=6)
    a, b = add(loop, "a", "abcdefgh", max_new_tokens=10), add(loop, "b", "stuvwxy", max_new_tokens=9)
    found = loop.steps(20)
    assert loop.scheduler.num_preemptions == 1, found
    assert (len(a.output_ids), len(b.output_ids), b.num_cached_tokens) == (10, 9, 0)
    counted = loop.scheduler.num_prefix_queries - 8 - 7, loop.scheduler.num_prefix_hits
    assert counted == (12, 4), "its known tokens, of which a has taken the others' blocks"
