"""Cells of packed tokens, the pool's counts, and the lengths at which requests are compressed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.extension import NoExtension
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.pool.prefix import PrefixSharing
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.operations_attention import OperationsAttention
from shared.cache.view.paged import PagedView
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.errors import CapacityError
from shared.loading.config_json import read_config
from shared.ops.attention import naive_attention
from shared.scheduling.schedule import DecodeRun, Schedule
from shared.tracks.compression.compressors import COMPRESSORS
from shared.tracks.compression.interface import compress, select
from shared.tracks.compression.kept_cells import KeptCells, masked_attention
from shared.tracks.compression.layout import Cells, Holding, Packed
from shared.tracks.compression.memory import num_shareable
from shared.tracks.compression.operations_attention import CondensedOperations
from shared.tracks.compression.pool import CompressedRequests
from shared.tracks.compression.scheduler import CompressingScheduler
from shared.tracks.compression.selection import Budget
from tests.comparison import assert_equal
from tests.steps import commit, make_request, step_of


@pytest.mark.parametrize(
    ("cells", "table", "expected"),
    [
        (Cells(num_layers=1, num_blocks=3, block_size=2, num_kv_heads=1), [2, 0], [4, 5, 0, 1]),
        (Cells(num_layers=2, num_blocks=3, block_size=2, num_kv_heads=1), [2, 0], [4, 5, 10, 11, 0, 1, 6, 7]),
        (Cells(num_layers=2, num_blocks=2, block_size=1, num_kv_heads=2), [1, 0], [2, 3, 6, 7, 0, 1, 4, 5]),
        (Cells(num_layers=3, num_blocks=2, block_size=1, num_kv_heads=1), [1, 0], [1, 3, 5, 0, 2, 4]),
    ],
    ids=["one layer", "two layers", "two heads", "three layers"],
)
def test_cells_that_can_be_counted_by_hand(cells: Cells, table: list[int], expected: list[int]) -> None:
    found = cells.packed(np.arange(len(expected)), np.array(table, np.int32))
    assert_equal(found.tolist(), expected, "cell", ("token",))


def test_a_memory_may_have_more_cells_than_an_int32() -> None:
    cells = Cells(num_layers=64, num_blocks=1 << 20, block_size=16, num_kv_heads=8)
    found = cells.packed(np.array([0]), np.array([(1 << 20) - 1], np.int32))
    assert_equal(found, np.array([(1 << 27) - 128]), "cell", ("token",))
    found = cells.packed(np.array([cells.per_block - 1]), np.array([(1 << 20) - 1], np.int32))
    assert_equal(found, np.array([(1 << 33) - 1]), "cell", ("token",))
    cells = Cells(num_layers=1, num_blocks=1 << 25, block_size=16, num_kv_heads=8)
    found = cells.packed(np.array([0]), np.array([(1 << 25) - 1], np.int32))
    assert_equal(found, np.array([(1 << 32) - 128]), "cell of a layer that has more than an int32", ("token",))


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.data())
def test_packed_tokens_fill_whole_blocks_once(layers: int, blocks: int, size: int, heads: int, data: Any) -> None:
    cells = Cells(layers, blocks, size, heads)
    table = np.array(data.draw(st.permutations(range(blocks))), np.int32)
    memory = torch.arange(layers * blocks * size * heads).view(layers, blocks, size, heads)
    for entry, block in enumerate(table.tolist()):
        numbers = np.arange(entry * cells.per_block, (entry + 1) * cells.per_block)
        assert sorted(cells.packed(numbers, table)) == sorted(memory[:, block].flatten().tolist())
    slots = np.arange(blocks * size)
    for layer in range(layers):
        expected = memory[layer, table].flatten(0, 1).T
        assert torch.equal(torch.from_numpy(cells.plain(layer, slots, table)), expected)


def pool_of(num_blocks: int = 12) -> Any:
    return PagedKVCachePool(num_blocks, 4, 3, 48, CompressedRequests(Cells(2, num_blocks, 4, 2), NoExtension()))


def test_a_compression_frees_what_no_head_keeps() -> None:
    pool, request = pool_of(), make_request("a")
    assert pool.reserve(request, 31)
    commit(pool, step_of({request: 30}))
    counts = np.array([[3, 9], [20, 1]])  # 33 of 120 cells; a block has 16
    assert pool.extension.compress(pool, request, Packed(counts, 30, pool.extension.cells.slots_for(counts))) == 4
    assert (pool.length(request), pool.num_slotless.get(request, 0)) == (12, 18)
    assert pool.table(request).tolist() == [0, 1, 2, 3], "three blocks are packed; token 31 has the fourth"
    assert pool.allocator.num_free == 8
    assert pool.audit_blocks() == []
    assert pool.layout(step_of({request: 1})).slot_mapping.tolist() == [12]
    assert pool.reserve(request, 34)
    assert pool.allocator.num_free == 8
    assert pool.reserve(request, 35)
    assert pool.allocator.num_free == 7, "counted from the first token, whatever became of it"
    for num_tokens, free in ((38, 7), (39, 6)):
        request.num_tokens = num_tokens
        assert pool.reserve_next([request]) == [], "a slot for each token after the packed part"
        assert pool.allocator.num_free == free
    pool.shrink(request, 34)
    assert pool.allocator.num_free == 8
    with pytest.raises(CapacityError, match="of its first 30 some were dropped"):
        pool.truncate(request, 29)
    pool.truncate(request, 30)
    pool.release(request)
    assert pool.audit() == []
    assert pool.num_slotless.get(request, 0) == 0


def test_the_layout_of_a_run_does_not_continue_after_a_compression() -> None:
    pool, request = pool_of(), make_request("a")
    run = DecodeRun([request], 9)
    assert pool.reserve(request, 31)
    commit(pool, step_of({request: 29}))
    assert pool.layout(Schedule.of_run(2, run, [29])).slot_mapping.tolist() == [29]
    pool.commit_next([request])
    request.num_computed_tokens = 30
    counts = np.array([[3, 9], [20, 1]])  # of these tokens three blocks are left
    pool.extension.compress(pool, request, Packed(counts, 30, pool.extension.cells.slots_for(counts)))
    assert pool.layout(Schedule.of_run(3, run, [30])).slot_mapping.tolist() == [12]


def test_tails_and_parts_of_compressed_requests() -> None:
    """Slots of whole blocks; tokens that are masked stay where they are; a part of a batch has its own."""
    assert [pool_of().extension.cells.slots_for(np.array([count])) for count in (15, 16, 17)] == [4, 4, 8]
    masked = Holding(0, np.arange(5, dtype=np.int32), 20, Packed(np.ones((2, 2), np.int64), 14, 0))
    assert (masked.num_tail, masked.num_tokens, masked.num_packed_slots) == (6, 20, 0)
    pool, requests = pool_of(), [make_request(name) for name in "ab"]
    for request in requests:
        assert pool.reserve(request, 9)
        commit(pool, step_of({request: 8}))
    pool.extension.compress(pool, requests[0], Packed(np.ones((2, 2), np.int64), 8, 4))
    layout = pool.layout(step_of(dict.fromkeys(requests, 1)))
    assert [one is None for one in layout.extra.packed] == [False, True]
    assert layout.part(slice(1, 2), slice(1, 2)).extra.packed == (None,)


def test_the_ring_has_the_last_queries_of_each_sequence_and_less_than_a_block_is_not_dropped(
    tiny_checkpoints: dict[str, Path],
) -> None:
    config, generator = read_config(tiny_checkpoints["llama"]), torch.Generator().manual_seed(0)
    options = COMPRESSORS["snapkv"](config.attention_scale), Budget(13, 13, num_sinks=1, num_recent=4), 4, True
    sizes = PagedSizes(24, 4, 3, 48, 96)
    storage = PlainStorage(config, sizes, torch.float32)
    kept = KeptCells(config, sizes, torch.float32, storage, *options)
    attention = CondensedOperations(OperationsAttention(storage, "sdpa"), kept)
    view = PagedView(config, sizes, torch.float32, storage, attention)
    pool = PagedKVCachePool(24, 4, 3, 48, CompressedRequests(kept.cells, NoExtension()))
    requests = [*map(make_request, "ab")]
    Hq, Hkv = config.num_heads, config.num_kv_heads
    seen: list[list[torch.Tensor]] = [[], []]
    for new in ((13, 2), (1, 6)):
        for request, count in zip(requests, new, strict=True):
            assert pool.reserve(request, request.num_computed_tokens + count)
        schedule = step_of(dict(zip(requests, new, strict=True)))
        positions = view.load(Batch.of(schedule, pool)).tokens.positions
        for layer in range(config.num_layers):
            heads = torch.randn(sum(new), Hq + 2 * Hkv, config.head_dim, generator=generator)
            q, k, v = heads.split((Hq, Hkv, Hkv), 1)
            view.attend(layer, view.write(layer, q, k, v, positions, lambda q, k, positions: (q, k)), scale=1.0)
        for known, queries in zip(seen, q.split(new), strict=True):
            known += queries
        commit(pool, schedule)
    for request, known in zip(requests, seen, strict=True):
        for position in range(len(known) - 4, len(known)):
            found = kept.ring.queries[-1, pool.rows[request], position % 4]
            assert torch.equal(found, known[position]), f"query {position} of request {request.request_id}"
    placed: list[Packed] = []
    for most, expected in ((13, []), (10, [10])):  # of 14 tokens; a block has 4 of each head
        kept.budget = replace(kept.budget, least=most, most=most)
        assert attention.compress(attention.sequences[0], lambda packed: placed.append(packed)) is None
        assert sorted({count for packed in placed for count in packed.counts.flatten().tolist()}) == expected


def test_the_audit_sees_a_packed_part_of_a_wrong_size() -> None:
    pool, request = pool_of(), make_request("a")
    pool.reserve(request, 30)
    commit(pool, step_of({request: 30}))
    pool.extension.compress(pool, request, Packed(np.array([[3, 9], [20, 1]]), 30, 8))
    assert "a packed part of 8 slots and its 33 kept tokens fill 12" in pool.audit_blocks()[0]
    pool.extension.packed = {make_request("b"): Packed(np.ones((2, 2), np.int64), 1, 4)} | pool.extension.packed
    found = pool.audit_blocks()
    assert "b is compressed and holds no blocks" in found[0]
    assert "a packed part of 8 slots" in found[1]


def sharing(num_blocks: int) -> Any:
    """Requests share all but their last 4 tokens; a block has 4 slots, of 2 layers and 2 heads."""
    cells, sizes = Cells(2, num_blocks, 4, 2), PagedSizes(num_blocks, 4, 3, 48, 48)
    prefixes = PrefixSharing(4, lambda request: request.num_prompt_tokens - 4)
    return PagedKVCachePool.of(sizes, CompressedRequests(cells, prefixes))


def compute(pool: Any, name: str, length: int) -> Any:
    """A request with the tokens 0, 1, 2 …, all in the cache; another beside it, if it is not the first."""
    request = make_request(name, range(length))
    num_cached = pool.admit(request)
    assert pool.reserve(request, length + 1)
    commit(pool, step_of({request: length - num_cached}))
    return request, num_cached


FEW = Packed(np.array([[3, 9], [20, 1]]), 28, 12)  # 33 of 112 cells: three blocks of 16


def test_the_tree_keeps_the_blocks_that_a_compressed_request_leaves() -> None:
    pool = sharing(9)
    first, num_cached = compute(pool, "a", 28)
    assert num_cached == 0
    assert pool.free_tokens == 4, "28 tokens and the next one: 8 blocks"
    assert pool.extension.compress(pool, first, FEW) == 4
    table = pool.table(first).tolist()
    assert len(table) == 4
    assert len(pool.cached_blocks()) == 7 - 2, "one block was free, and two more were needed"
    assert not set(table) & set(pool.cached_blocks())
    for num_tokens in range(29, 33):
        assert pool.reserve(first, num_tokens)
        commit(pool, step_of({first: 1}))
    assert pool.extension.sharing.tree.num_blocks == 5, "nothing after a compression enters the tree"
    assert pool.length(first) == 16
    assert pool.audit_blocks() == []

    pool.release(first)
    second, num_cached = compute(pool, "b", 24)
    assert num_cached == 20
    assert pool.audit_blocks() == []
    with pytest.raises(CapacityError, match="its first 24 are committed to the prefix tree"):
        pool.truncate(second, 23)
    pool.release(second)
    assert pool.audit() == []


def test_a_request_computes_the_tokens_whose_queries_decide() -> None:
    pool = sharing(24)
    pool.release(compute(pool, "a", 28)[0])
    pool.extension.sharing.num_shareable = lambda request: request.num_prompt_tokens - 6
    assert [pool.admit(make_request(str(n), range(n))) for n in (28, 20)] == [20, 12]
    config = replace(
        scheduler_of(pool).config, query_window_size=6
    )  # of tokens 8 to 13, or the last of a longer prompt
    found = [num_shareable(config, make_request("a", range(n))) for n in (1, 5, 9, 14, 20)]
    assert found == [0, 4, 8, 8, 14], "a token is left to compute"


def test_blocks_of_others_are_not_taken() -> None:
    """Two requests share 7 blocks of 10 and have one each; the first compression needs three and finds one."""
    pool = sharing(10)
    (first, _), (second, num_cached) = compute(pool, "a", 28), compute(pool, "b", 28)
    assert num_cached == 24
    assert pool.free_tokens == 4
    before = pool.table(first).tolist()
    assert pool.extension.compress(pool, first, FEW) is None
    assert pool.table(first).tolist() == before
    assert pool.audit_blocks() == []
    pool.release(second)
    assert pool.extension.compress(pool, first, FEW) == 4
    assert pool.audit_blocks() == []


def test_the_youngest_makes_room_for_a_compression() -> None:
    pool = sharing(10)
    scheduler = scheduler_of(pool)
    (first, _), (second, _) = compute(pool, "a", 28), compute(pool, "b", 28)
    scheduler.running |= {"a": first, "b": second}
    assert scheduler.free_memory(first)
    assert list(scheduler.running) == ["a"]
    assert pool.extension.compress(pool, first, FEW) == 4
    assert scheduler.schedule().preempted == ("b",)
    assert not scheduler.free_memory(first)
    assert not scheduler.running


def scheduler_of(pool: Any, **config: Any) -> CompressingScheduler:
    options = {"layer_budget": 10, "layer_upper_budget": 12, "steps_between_compressions": 4}
    return CompressingScheduler(EngineConfig(compress_method="snapkv", block_size=4, **options | config), pool, 48)


@pytest.mark.parametrize(
    ("prompt", "points"), [(3, [14, 18, 22]), (14, [14, 18, 22]), (15, [15, 19, 23]), (30, [30, 34, 38])]
)
def test_lengths_depend_on_the_prompt_alone(prompt: int, points: list[int]) -> None:
    scheduler, request = scheduler_of(pool_of()), make_request("a", range(prompt))
    found, length = [], 0
    for _ in points:
        found.append(length := scheduler.next_point(request, length))
    assert found == points
    nearest = [next(point for point in points if point > n) for n in range(points[-1])]
    assert [scheduler.next_point(request, n) for n in range(points[-1])] == nearest


def test_tokens_computed_again_are_cut_where_they_were_compressed() -> None:
    pool = pool_of()
    scheduler, request = scheduler_of(pool), make_request("a", range(5))
    for token in range(20):
        request.append(token)
    scheduler.add(request)
    starts = []
    for end in (14, 18, 22, 25):
        (entry,) = scheduler.schedule()
        starts.append((entry.start, entry.start + entry.num_tokens, entry.num_logit_rows))
        if end < 25:
            assert not scheduler.schedule(), "the compression waits for the step in flight"
        commit(pool, Schedule(1, (entry,)))
        assert list(scheduler.due()) == ([request] if end < 25 else [])
        scheduler.compressed(request, None, 0)
        assert list(scheduler.due()) == []
    assert starts == [(0, 14, 0), (14, 18, 0), (18, 22, 0), (22, 25, 1)]


def test_other_requests_go_on_while_one_waits_for_its_compression() -> None:
    pool = pool_of()
    scheduler, one, other = scheduler_of(pool), make_request("a", range(14)), make_request("b", range(5))
    scheduler.add(one)
    scheduler.add(other)
    first = scheduler.schedule()
    assert {entry.request: entry.num_tokens for entry in first} == {one: 14, other: 5}
    second = scheduler.schedule()
    assert [entry.request for entry in second] == [other], "one reaches its first length in the step in flight"
    scheduler.add(late := make_request("c", range(3)))
    assert [entry.request for entry in scheduler.schedule()] == [other, late], "nor beside a prompt"
    commit(pool, first)
    assert list(scheduler.due()) == [one]
    scheduler.compressed(one, None, 0)
    assert {entry.request for entry in scheduler.schedule()} == {one, other, late}


def test_of_requests_that_wait_in_turn_the_others_go_on() -> None:
    """As many in each step, and not the same."""
    pool = pool_of(32)
    scheduler, requests = scheduler_of(pool), [make_request(name, range(n)) for n, name in enumerate("cba", 11)]
    for request in requests[::-1]:
        scheduler.add(request)
    commit(pool, scheduler.schedule())
    steps = [scheduler.schedule(), scheduler.schedule()]
    commit(pool, steps[0])
    assert list(scheduler.due()) == requests[2:]
    scheduler.compressed(requests[2], None, 0)
    steps.append(scheduler.schedule())
    assert ["".join(entry.request.request_id for entry in step) for step in steps] == ["abc", "bc", "ac"]


@pytest.mark.parametrize(("num_blocks", "lengths"), [(8, (14, 13)), (2, (4, 4))], ids=["compression", "ends"])
def test_none_is_preempted_before_compressions_and_ends_are_known(num_blocks: int, lengths: tuple[int, int]) -> None:
    pool = pool_of(num_blocks)
    pool.watermark_tokens = 0
    scheduler = scheduler_of(pool)
    for name, length in zip("ab", lengths, strict=True):
        scheduler.add(make_request(name, range(length)))
    first = scheduler.schedule()
    assert [entry.num_tokens for entry in first] == [*lengths]
    assert pool.free_tokens == 0
    assert not scheduler.schedule(), "the step in flight is finished first"
    assert (scheduler.num_preemptions, scheduler.num_steps) == (0, 1)


def test_a_preempted_request_is_compressed_again_at_its_lengths() -> None:
    pool = pool_of()
    scheduler, request = scheduler_of(pool), make_request("a", range(14))
    scheduler.add(request)
    for _ in range(2):
        (entry,) = scheduler.schedule()
        assert entry[1:3] == (0, 14)
        commit(pool, Schedule(1, (entry,)))
        assert list(scheduler.due()) == [request]
        scheduler.compressed(request, None, 0)
        scheduler.preempt(request)
        named = [scheduler.schedule().preempted for _ in range(2)]
        assert named == [("a",), ()], "a request is admitted in the step after"
        scheduler.drop_in_flight()


@pytest.mark.parametrize("has_room", [False, True])
def test_a_compression_is_tried_again_while_room_can_be_made(has_room: bool) -> None:
    pool = sharing(10)
    (first, _), (second, _) = compute(pool, "a", 28), compute(pool, "b", 28)
    asked = []

    def free_memory(request: Any) -> bool:
        asked.append(request)
        pool.release(second)
        return has_room

    attention = SimpleNamespace(compress=lambda sequence, place: None if place(FEW) is None else FEW)
    view: Any = SimpleNamespace(attention=attention)
    kept = ((3, 9), (20, 1)) if has_room else None
    assert compress(pool, view, first, free_memory) == (kept, 4 if has_room else 0)
    assert asked == [first]


def test_a_choice_that_begins_early_knows_the_tokens_in_flight() -> None:
    pool, request, found = pool_of(), make_request("a", range(14)), []
    assert pool.reserve(request, 14)
    request.num_scheduled_tokens = 14
    view: Any = SimpleNamespace(attention=SimpleNamespace(select=found.extend))
    select(pool, view, [request])
    assert [(one.length, one.table.tolist()) for one in found] == [(14, [0, 1, 2, 3])]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masked_attention_is_attention_of_what_is_kept(window: int | None, softcap: float | None) -> None:
    """Each head by itself, with its keys alone; the new tokens and the window's keys are always kept."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 8, generator=random)
    k, v = torch.randn(2, 2, 12, 8, generator=random)
    kept = torch.rand(2, 12, generator=random) > 0.5
    kept[:, -6:] = True
    out = masked_attention(q, k, v, kept, scale=0.3, window=window, softcap=softcap)
    for head in range(2):
        mine = slice(2 * head, 2 * head + 2)
        options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap}
        alone = naive_attention(q[:, mine], k[head : head + 1, kept[head]], v[head : head + 1, kept[head]], **options)
        torch.testing.assert_close(out[:, mine], alone)
