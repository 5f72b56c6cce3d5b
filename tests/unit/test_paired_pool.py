"""The two pools of a model and its draft model, where a step is interrupted."""

from types import SimpleNamespace

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.paired import PairedPool
from shared.cache.pool.prefix import PrefixSharing
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.sampling.params import SamplingParams
from tests.unit.machine_settings import MAX_SEQ_LEN, Followed


def test_drafts_of_an_interrupted_step_are_forgotten_with_their_blocks() -> None:
    sizes = PagedSizes(8, 2, 2, 64, MAX_SEQ_LEN)
    pair = PairedPool(*(PagedKVCachePool.of(sizes, PrefixSharing(sizes.block_size)) for _ in range(2)))
    drafter = Followed(EngineConfig(), pair, SimpleNamespace())
    request = Request("a", [5, 6, 7], SamplingParams(max_new_tokens=12), 0)
    pair.admit(request)
    assert pair.reserve(request, 7)
    draft_request = pair.draft_requests[request]
    drafter.pool.commit(draft_request, 3)
    draft_request.draft_ids = [10, 11, 12, 13]  # the keys of the first three are written
    pair.shrink(request, 5)
    assert pair.target.free_tokens == pair.draft.free_tokens == 10, "both pools free the same blocks"
    assert draft_request.draft_ids == [10, 11, 12]
    pair.shrink(request, request.num_tokens)  # as after an interruption
    for token_id in (10, 11, 12):
        request.append(token_id)
    assert pair.reserve(request, 7)  # in other blocks, perhaps
    assert drafter._follow(draft_request, request) == 3


def make_pair(num_draft_blocks: int = 8, draft_capacity: int = MAX_SEQ_LEN) -> PairedPool:
    target, draft = (
        PagedKVCachePool.of(PagedSizes(num, 2, 2, 64, longest), PrefixSharing(2))
        for num, longest in ((8, MAX_SEQ_LEN), (num_draft_blocks, draft_capacity))
    )
    return PairedPool(target, draft)


def admit(pair: PairedPool, outputs: tuple[int, ...] = ()) -> Request:
    request = Request("a", [5, 6, 7], SamplingParams(max_new_tokens=12), 0, output_ids=list(outputs))
    pair.admit(request)
    return request


def test_a_draft_request_scores_nothing() -> None:
    pair = make_pair()
    request = Request("a", [5, 6, 7], SamplingParams(max_new_tokens=12, logprobs=2, prompt_logprobs=1), 0)
    pair.admit(request)
    assert pair.draft_requests[request].params == SamplingParams(max_new_tokens=12)


def test_both_pools_reserve_or_none() -> None:
    pair = make_pair(num_draft_blocks=3)
    request = admit(pair, (8, 9))
    assert pair.draft_requests[request].token_ids == [5, 6, 7, 8, 9], "a preempted request's outputs are known"
    assert pair.reserve(request, 4)
    assert (pair.target.free_tokens, pair.draft.free_tokens, pair.free_tokens) == (12, 2, 2)
    other = admit(pair)
    assert not pair.reserve(other, 4)
    assert (pair.target.free_tokens, pair.draft.free_tokens) == (12, 2)
    assert pair.reserve(other, 2)
    assert pair.reserve(request, 2)
    pair.shrink(request, 3)  # of two blocks
    assert not pair.reserve(request, 6)
    assert (pair.target.free_tokens, pair.draft.free_tokens) == (10, 0), "the three tokens before stay reserved"
    for each in (request, other):
        pair.release(each)
    assert (pair.draft_requests, pair.granted, pair.audit()) == ({}, {}, [])
    assert pair.free_tokens == 6


def test_a_draft_model_that_reads_less_reserves_no_more_than_it_reads() -> None:
    pair = make_pair(draft_capacity=6)
    request = admit(pair)
    assert pair.reserve(request, 9)
    assert (pair.target.free_tokens, pair.draft.free_tokens) == (6, 10)


def test_cached_blocks_are_dropped_in_both_pools() -> None:
    pair = make_pair()
    request = admit(pair)
    assert pair.reserve(request, 3)
    pair.commit(request, 3)
    pair.draft.commit(pair.draft_requests[request], 3)
    pair.release(request)
    assert (len(pair.target.cached_blocks()), len(pair.draft.cached_blocks())) == (1, 1)
    pair.drop_cached()
    assert (len(pair.target.cached_blocks()), len(pair.draft.cached_blocks())) == (0, 0)
