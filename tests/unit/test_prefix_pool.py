"""The pool with a prefix tree: what an admitted request is handed, who waits for whom, and what is never written."""

import struct
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.layout.planned import AttentionPlanner, LayoutPlans, StepPlans
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing
from shared.cache.pool.prefix_tree import PrefixTree
from shared.engine.batch import Batch
from shared.engine.request import Request, RequestStatus
from shared.errors import BlockError, CapacityError
from shared.loading.config_json import read_config
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from tests.comparison import assert_equal
from tests.views import paged_view

SIZE = 4


def make_pool(num_blocks: int = 12, block_size: int = SIZE, max_sequences: int = 4) -> PagedKVCachePool:
    sizes = PagedSizes(num_blocks, block_size, max_sequences, 64, num_blocks * block_size)
    return PagedKVCachePool.of(sizes, PrefixSharing(block_size))


def make(name: str, ids: str, **params: Any) -> Request:
    """A letter is a token."""
    return Request(name, [ord(letter) for letter in ids], SamplingParams(**params), 0)


def start(pool: PagedKVCachePool, request: Request) -> int:
    """Admit a request, as a scheduler does; returns its cached tokens."""
    num_cached = pool.admit(request)
    assert_equal(pool.audit_blocks(), [], "audit of the blocks after admit", ("line",))
    assert pool.reserve(request, request.num_tokens), "the request was refused"
    request.num_computed_tokens = request.num_scheduled_tokens = num_cached
    request.status = RequestStatus.RUNNING
    return num_cached


def compute(pool: PagedKVCachePool, request: Request, num_tokens: int | None = None) -> None:
    """Compute the next tokens of a request: all, unless ``num_tokens`` says otherwise."""
    count = num_tokens if num_tokens is not None else request.num_tokens - request.num_computed_tokens
    pool.layout(Schedule(1, (Scheduled(request, request.num_computed_tokens, count),)))
    pool.commit(request, count)
    request.num_computed_tokens += count


def run(pool: PagedKVCachePool, request: Request) -> int:
    num_cached = start(pool, request)
    compute(pool, request)
    return num_cached


@pytest.mark.parametrize(
    ("ids", "cached", "shared"),
    [
        ("abcdefghij", 8, 2),  # the same prompt: its last block is not full
        ("abcdefghxy", 8, 2),
        ("abcdefgh", 7, 1),  # a full hit: one token is computed, in a copy of the last block
        ("abcd", 3, 0),  # a full hit of one block
        ("abcde", 4, 1),  # all but one token
        ("abcx", 0, 0),  # the block differs in its last token
        ("abc", 0, 0),  # shorter than a block
        ("xbcdefgh", 0, 0),
    ],
)
def test_a_request_gets_the_blocks_of_its_prefix(ids: str, cached: int, shared: int) -> None:
    pool, first, second = make_pool(), make("1", "abcdefghij"), make("2", ids)
    run(pool, first)
    assert_equal(start(pool, second), cached, f"cached tokens of {ids!r}")
    table, own = pool.table(first).tolist(), pool.table(second).tolist()
    assert_equal(own[:shared], table[:shared], f"shared blocks of {ids!r}", ("entry",))
    assert_equal(set(own[shared:]) & set(table), set(), "blocks beyond the prefix that belong to the first request too")
    assert_equal(pool.length(second), cached, "length")
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_a_wholly_cached_prompt_computes_a_token_in_a_copy_that_comes_back() -> None:
    pool, first, second = make_pool(), make("1", "abcdefgh"), make("2", "abcdefgh")
    run(pool, first)
    assert_equal(start(pool, second), 7, "cached tokens")
    (source, target) = (int(pool.table(request)[1]) for request in (first, second))
    layout = pool.layout(Schedule(1, (Scheduled(second, 7, 1),)))
    assert_equal(layout.copies.tolist(), [[source, target]], "copies, from and to", ("copy", "block"))
    assert_equal(layout.slot_mapping.tolist(), [target * SIZE + 3], "slot of the token: in the copy", ("token",))
    assert_equal(pool.used_tokens, 8 + 3, "used tokens: the first block counts once, and the copy's three")
    compute(pool, second)
    assert_equal(pool.table(second).tolist(), pool.table(first).tolist(), "the table after the step", ("entry",))
    assert_equal(pool.free_tokens, 10 * SIZE, "free tokens: the copy is free again")
    second.append(ord("i"))
    assert pool.reserve(second, 9), "a token was refused"
    layout = pool.layout(Schedule(1, (Scheduled(second, 8, 1),)))
    assert_equal(layout.copies.tolist(), [], "copies of the next step", ("copy", "block"))
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


@pytest.mark.parametrize(("num_blocks", "cached"), [(2, 4), (3, 4), (4, 7)])
def test_a_copy_is_made_only_where_it_leaves_room_for_the_next_token(num_blocks: int, cached: int) -> None:
    """Else a request that is alone could be preempted for want of the block that its own copy takes, forever."""
    pool, first, second = make_pool(num_blocks), make("1", "abcdefgh"), make("2", "abcdefgh")
    run(pool, first)
    pool.release(first)
    assert_equal(start(pool, second), cached, f"cached tokens with {num_blocks} blocks")
    compute(pool, second)
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_without_room_for_a_copy_the_salt_still_decides() -> None:
    pool, first, second = make_pool(3), *(make(name, "abcdefgh", cache_salt="tenant 1") for name in "12")
    run(pool, first)
    pool.release(first)
    assert_equal(start(pool, second), 4, "cached tokens with 3 blocks, the same salt")


def test_a_preempted_request_finds_its_answer_too() -> None:
    """Its outputs are computed again as its prompt is: all but one of its tokens may be cached."""
    pool, request = make_pool(), make("1", "abcdefgh")
    run(pool, request)
    for letter in "ijkl":
        request.append(ord(letter))
        assert pool.reserve(request, request.num_tokens), "a token was refused"
        compute(pool, request)
    pool.release(request)
    assert_equal(start(pool, request), 11, "cached tokens of 12, of which 8 are the prompt")
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_blocks_of_one_token() -> None:
    pool, first, second = make_pool(block_size=1), make("1", "abc"), make("2", "abc")
    run(pool, first)
    assert_equal(run(pool, second), 2, "cached tokens")
    assert_equal(pool.table(second).tolist(), pool.table(first).tolist(), "table", ("entry",))
    assert_equal(pool.used_tokens, 3, "used tokens: each counts once")


def test_two_requests_that_computed_the_same_share_it_afterwards() -> None:
    pool, first, second = make_pool(), make("1", "abcdefghi"), make("2", "abcdefghx")
    start(pool, first)
    start(pool, second)
    compute(pool, second)
    compute(pool, first)
    assert_equal(pool.table(first)[:2].tolist(), pool.table(second)[:2].tolist(), "the first two blocks", ("entry",))
    assert_equal((pool.free_tokens, pool.used_tokens), (8 * SIZE, 10), "free and used tokens")
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_cached_blocks_are_evicted_only_when_a_block_is_needed() -> None:
    pool, old, new = make_pool(6), make("1", "abcdefgh"), make("2", "stuv")
    run(pool, old)
    pool.release(old)
    run(pool, new)
    pool.release(new)
    assert_equal(len(pool.cached_blocks()), 3, "cached blocks, while three are free")
    assert_equal(pool.free_tokens, pool.capacity_tokens, "free tokens")
    third = make("3", "x" * 17)
    start(pool, third)
    assert_equal(len(pool.cached_blocks()), 1, "cached blocks, when two more were needed")
    pool.release(third)
    assert_equal(pool.admit(make("4", "abcdefgh")), 0, "cached tokens of the least recently used prompt")
    assert_equal(pool.admit(make("5", "stuvw")), 4, "cached tokens of the other")


def test_a_prompt_whose_middle_was_evicted_is_cached_up_to_there() -> None:
    pool, request = make_pool(4), make("1", "abcdefghijklm")
    run(pool, request)
    pool.release(request)
    other = make("2", "xxxxxxxx")
    start(pool, other)
    pool.release(other)
    assert_equal(start(pool, request), 8, "cached tokens: two of three blocks")


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_step_evicts_all_blocks_that_it_lacks_at_once_or_none(num_free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free blocks come first, then evicted ones, as if each request had reserved its own."""
    pool, old = make_pool(6 + num_free), make("1", "abcdefghijkl")
    run(pool, old)
    pool.release(old)
    running = [make(str(n), ids) for n, ids in enumerate(("ssss", "tttt", "uuuu"), 2)]
    for request in running:
        run(pool, request)
        request.append(ord("x"))
    evict, evicted = pool.extension.tree.evict, []
    monkeypatch.setattr(pool.extension.tree, "evict", lambda count: evicted.append(count) or evict(count))
    assert_equal(pool.reserve_next(running), [], "requests for which there is no block")
    assert_equal(evicted, [3 - num_free], "blocks of each eviction")
    given = [int(pool.table(request)[1]) for request in running]
    assert_equal(given, [*[6] * num_free, 2, 1, 0][:3], "new block of each request", ("request",))
    assert_equal(pool.audit_blocks(), [], "audit of the blocks", ("line",))
    for request in running:
        for letter in "yyyy":
            request.append(ord(letter))
    assert_equal(pool.reserve_next(running), running, "requests, where no block is cached and too few are free")
    assert_equal(len(evicted), 1, "evictions")


def test_requests_that_begin_alike_wait_for_the_first() -> None:
    pool = make_pool(30, max_sequences=8)
    leader, follower, other = make("1", "abcdefghijkl"), make("2", "abcdefghxxxx"), make("3", "stuvwxyz")
    assert not pool.must_wait(leader), "no request runs"
    start(pool, leader)
    assert pool.must_wait(follower), "the leader computes the first block of both"
    assert not pool.must_wait(other), "nothing in common"
    compute(pool, leader, 4)
    assert pool.must_wait(follower), "the second block is still missing"
    assert pool.must_wait(make("4", "abcdefgh")), "the whole prompt is a part of the leader's"
    assert not pool.must_wait(make("5", "abcdxxxx")), "all that it shares is there"
    compute(pool, leader, 4)
    assert not pool.must_wait(follower), "all that it shares is there, though the leader computes"
    assert_equal(start(pool, follower), 8, "cached tokens of the follower")


def test_a_request_waits_while_any_request_computes_its_block() -> None:
    """Two begin to compute the same; one leaves, then the other."""
    pool = make_pool(30, max_sequences=8)
    first, second, third = (make(name, "abcdefgh") for name in "123")
    start(pool, first)
    start(pool, second)
    pool.release(second)
    assert pool.must_wait(third), "the first still computes it"
    pool.release(first)
    assert not pool.must_wait(third), "no request computes it"


def test_a_request_that_leaves_a_prefix_earlier_does_not_wait() -> None:
    """Its next block has the tokens that a running request computes, but after another prefix."""
    pool, leader = make_pool(), make("1", "abcdefghijkl")
    start(pool, leader)
    compute(pool, leader, 8)
    assert not pool.must_wait(make("2", "abcdijkl")), "abcd and then ijkl"
    assert pool.must_wait(make("3", "abcdefghijkl")), "the same prompt"


def test_a_salt_shares_with_the_same_salt_alone() -> None:
    pool = make_pool(30, max_sequences=8)
    run(pool, make("1", "abcdefghi", cache_salt="tenant 1"))
    running = make("2", "stuvwxyz", cache_salt="tenant 1")
    start(pool, running)
    for salt, cached in ((None, 0), ("tenant 2", 0), ("tenant 1", 8)):
        assert_equal(pool.must_wait(make("w", "stuvwxyz", cache_salt=salt)), cached > 0, f"{salt}: waits")
        assert_equal(pool.admit(make("x", "abcdefghi", cache_salt=salt)), cached, f"{salt}: cached tokens")


def test_a_shared_block_is_never_written() -> None:
    pool, request = make_pool(), make("1", "abcdefghi")
    run(pool, request)
    with pytest.raises(BlockError, match="The step would write block 1, which is shared"):
        pool.layout(Schedule(1, (Scheduled(request, request.num_computed_tokens - 4, 2),)))
    with pytest.raises(CapacityError, match="cannot be truncated to 7 tokens: its first 8 are committed"):
        pool.truncate(request, 7)
    pool.truncate(request, 8)
    assert_equal(pool.length(request), 8, "length after a token was dropped")


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_part_of_a_batch_makes_its_own_copies(is_planned: bool) -> None:
    """When a request fails, the others run by themselves."""
    pool, requests = make_pool(), [make(name, "abcdefgh") for name in "123"]
    if is_planned:
        planner = cast(AttentionPlanner, SimpleNamespace(plan=lambda *options: StepPlans({}, {})))
        pool.lay_out = partial(LayoutPlans.planned, planner=planner)
    run(pool, requests[0])
    for request in requests[1:]:
        start(pool, request)
    layout = pool.layout(Schedule(1, tuple(Scheduled(request, 7, 1) for request in requests[1:])))
    parts = [layout.part(slice(n, n + 1), slice(n, n + 1)).copies.tolist() for n in range(2)]
    assert_equal(parts, [[pair] for pair in layout.copies.tolist()], "copies of each part", ("part", "copy", "block"))


def test_a_block_is_copied_in_all_layers_before_a_step_writes_into_it(tiny_checkpoints: dict[str, Path]) -> None:
    pool, (first, second) = make_pool(), [make(name, "abcdefgh") for name in "12"]
    run(pool, first)
    start(pool, second)
    batch = Batch.of(Schedule(1, (Scheduled(second, 7, 1),)), pool)
    view = paged_view(read_config(tiny_checkpoints["llama"]), PagedSizes(12, SIZE, 4, 64, 48))
    memories = view.keys, view.values
    for memory in memories:
        memory.normal_(generator=torch.Generator().manual_seed(0))
    before = [memory.clone() for memory in memories]
    view.load(batch)
    ((source, target),) = cast(PagedLayout, batch.layout).copies.tolist()
    for memory, was in zip(memories, before, strict=True):
        assert_equal(memory[:, target].tolist(), was[:, source].tolist(), "the copy of a block", ("layer", "slot"))


def test_the_audit_finds_damage() -> None:
    pool, request = make_pool(), make("1", "abcdefghi")
    run(pool, request)
    pool.extension.tree.root.children[next(iter(pool.extension.tree.root.children))].num_users = 2
    assert any("counts 2 users and has 1" in line for line in pool.audit_blocks())
    pool.allocator.free(pool.extension.tree.blocks())
    assert any("can be allocated while in use" in line for line in pool.audit_blocks())


def long_prompt(pool: PagedKVCachePool) -> list[int]:
    """The ids of a prompt of 8193 tokens, all of whose blocks are in the tree."""
    ids = np.random.default_rng(0).integers(0, 128_000, 8193).tolist()
    run(pool, Request("1", ids, SamplingParams(), 0))
    return ids


def big_pool() -> PagedKVCachePool:
    return PagedKVCachePool.of(PagedSizes(600, 16, 4, 8192, 9000), PrefixSharing(16))


def test_a_long_prompt_is_found_with_one_look_at_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request computed in one step is one node, which is compared as a whole."""
    pool = big_pool()
    ids, compared, packed = long_prompt(pool), [], []
    child_name, pack = PrefixTree.child_name, struct.pack
    monkeypatch.setattr(PrefixTree, "child_name", lambda *args, **more: compared.append(1) or child_name(*args, **more))
    monkeypatch.setattr(struct, "pack", lambda *args: packed.append(len(args) - 1) or pack(*args))
    request = Request("2", ids, SamplingParams(), 0)
    assert_equal(pool.admit(request), 8192, "cached tokens")
    assert_equal(packed, [len(ids)], "ids that are packed, in each call")
    assert_equal(len(compared), 1, "children that are looked up")
    assert_equal(pool.admit(request), 8192, "cached tokens, asked again")
    assert_equal(packed, [len(ids)], "ids that are packed, in each call: those of a request once")


@pytest.mark.measured
def test_a_prompt_of_8192_tokens_is_found_in_0_3_ms() -> None:
    """With all its blocks in the tree, and the ids of the request packed anew."""
    pool = big_pool()
    ids, seconds = long_prompt(pool), []
    for _ in range(50):
        request = Request("2", ids, SamplingParams(), 0)
        begin = time.perf_counter()
        assert pool.admit(request) == 8192
        seconds.append(time.perf_counter() - begin)
        pool.release(request)
    assert min(seconds) <= 0.3e-3, f"{min(seconds) * 1e3:.2f} ms"
