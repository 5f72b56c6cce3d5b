"""Which chunks are computed when: before the request that lacks them, once, and past no request before it."""

from typing import Any

import pytest

from shared.cache.paged_layout import PagedSizes
from shared.chunks.pool import chunk_pool
from shared.chunks.registry import Chunk, ChunkRegistry
from shared.chunks.scheduler import ChunkScheduler
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from tests.comparison import assert_equal

SIZE = 4


@pytest.fixture
def scheduler() -> ChunkScheduler:
    registry = ChunkRegistry()
    pool = chunk_pool(PagedSizes(24, SIZE, 4, 64, 80), registry, True)
    return ChunkScheduler(EngineConfig(max_batch_size=4, prefill_chunk_size=4), pool, 80, registry)


def chunk(scheduler: ChunkScheduler, letter: str, count: int = SIZE, is_resident: bool = False) -> Chunk:
    found = scheduler.registry.add("user", [ord(letter)] * count)
    if is_resident:
        blocks = scheduler.pool.allocator.allocate(-(-count // SIZE))
        assert blocks is not None, "the pool of the test is too small"
        scheduler.registry.store(found, blocks)
    return found


def ask(scheduler: ChunkScheduler, name: str, *chunks: Chunk) -> Request:
    ids = [token_id for one in chunks for token_id in one.token_ids] + [7]
    request = Request(name, ids, SamplingParams(max_new_tokens=4), 0)
    if chunks:
        scheduler.registry.contexts[request] = chunks
    scheduler.add(request)
    return request


def queue(scheduler: ChunkScheduler) -> list[str]:
    """The waiting requests; one that computes a chunk by the letter of the chunk."""
    computing = scheduler.registry.computing
    return [
        chr(computing[request].token_ids[0]) if request in computing else request.request_id
        for request in scheduler.waiting.values()
    ]


def commit(scheduler: ChunkScheduler, schedule: Schedule) -> None:
    count = sum(entry.num_logit_rows for entry in schedule)
    scheduler.commit(schedule, SampledTokens([5] * count, None, {}))


def test_missing_chunks_stand_directly_before_the_request_that_lacks_them(scheduler: ChunkScheduler) -> None:
    """Those before it keep their place, and their chunks; only the first that lacks any has them computed."""
    a, b, c = (chunk(scheduler, letter) for letter in "abc")
    d = chunk(scheduler, "d", is_resident=True)
    e = chunk(scheduler, "e", is_resident=True)
    ask(scheduler, "1", e)
    ask(scheduler, "2", b, d, a, b)
    ask(scheduler, "3", c)
    ask(scheduler, "4")
    scheduler.put_missing_chunks_first()
    assert_equal(queue(scheduler), ["1", "b", "a", "2", "3", "4"], "queue", ("place",))
    assert_equal(list(scheduler.registry.resident.values()), [e, d], "resident, the last used last", ("place",))
    schedule = scheduler.schedule()
    assert_equal(len(schedule), 3, "requests of the step: the first, and two that compute chunks")
    assert_equal(queue(scheduler), ["2", "3", "4"], "queue", ("place",))


def test_what_is_being_computed_is_not_asked_for_again(scheduler: ChunkScheduler) -> None:
    a, b = chunk(scheduler, "a"), chunk(scheduler, "b")
    scheduler.registry.want(b)
    ask(scheduler, "1", a)
    ask(scheduler, "2", a, b)
    commit(scheduler, scheduler.schedule())  # b was wanted and joined the end of the queue, behind what waits
    assert a.is_resident, "chunk a was computed"
    assert not b.is_resident, "chunk b was computed before the request that lacks a"
    assert_equal(queue(scheduler), ["1", "2", "b"], "queue", ("place",))
    scheduler.put_missing_chunks_first()
    assert_equal(queue(scheduler), ["1", "b", "2"], "queue: what computes b has moved", ("place",))
    commit(scheduler, scheduler.schedule())
    scheduler.put_missing_chunks_first()
    assert_equal(queue(scheduler), ["2"], "queue", ("place",))
    assert b.is_resident, "chunk b was computed"
    commit(scheduler, scheduler.schedule())
    assert "2" in scheduler.running, "request 2 has all its chunks and runs"
    assert_equal(scheduler.pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_without_missing_chunks_the_queue_stays_as_it_is(scheduler: ChunkScheduler) -> None:
    a = chunk(scheduler, "a", is_resident=True)
    ask(scheduler, "1")
    ask(scheduler, "2", a)
    scheduler.put_missing_chunks_first()
    assert_equal(queue(scheduler), ["1", "2"], "queue", ("place",))
    assert not scheduler.registry.computing, "a chunk is computed that no request lacks"


@pytest.mark.parametrize("end", ["failure", "abort"])
def test_requests_fail_with_a_chunk_that_they_wait_for_and_stay_if_it_is_aborted(
    scheduler: ChunkScheduler, end: str
) -> None:
    """A client's request may have the name of the one that computes."""
    a = chunk(scheduler, "a")
    named, waiting = ask(scheduler, f"chunk {a.chunk_id}"), ask(scheduler, "1", a)
    schedule = scheduler.schedule()
    assert schedule.requests[0] is named
    computing = schedule.requests[1]
    if end == "abort":
        assert scheduler.abort(computing.request_id) is computing
        assert (a.error, queue(scheduler)) == (None, ["1"])
        return
    scheduler.commit(schedule, SampledTokens([5], None, {1: RuntimeError("no memory")}))
    assert (waiting.status, waiting.error) == (RequestStatus.FAILED, a.error)
    assert a.error is not None
    assert "RuntimeError" in a.error
    assert list(scheduler.running.values()) == [named]


def test_wanted_chunks_are_work(scheduler: ChunkScheduler) -> None:
    assert not scheduler.has_work()
    scheduler.registry.want(chunk(scheduler, "a"))
    assert scheduler.has_work()


def test_a_chunk_is_complete_with_its_last_token_and_takes_nothing_from_the_prefix_tree(
    scheduler: ChunkScheduler,
) -> None:
    pool, plain = scheduler.pool, Request("p", [ord("a")] * 9, SamplingParams(), 0)
    assert (pool.admit(plain), pool.reserve(plain, 9)) == (0, True)
    pool.commit(plain, 9)
    a = chunk(scheduler, "a", 9)
    scheduler.registry.want(a)
    for start in (0, 4, 8):
        assert not a.is_resident
        (entry,) = schedule = scheduler.schedule()
        assert entry.start == start, "a chunk is computed as a whole"
        commit(scheduler, schedule)
    assert a.is_resident


def test_chunks_are_evicted_last_and_a_request_s_tokens_count_from_the_first(scheduler: ChunkScheduler) -> None:
    pool, a, plain = scheduler.pool, chunk(scheduler, "a", is_resident=True), ask(scheduler, "p")
    assert (pool.admit(plain), pool.reserve(plain, 80)) == (0, True)
    plain.prompt_ids = [*range(80)]
    plain.num_prompt_tokens = plain.num_tokens = 80
    pool.commit(plain, 80)
    pool.release(plain)
    request = ask(scheduler, "1", a)
    assert pool.reserve(plain, 16)
    assert a.is_resident, "the tree gives its blocks first"
    pool.release(plain)
    assert (pool.admit(request), pool.reserve(request, SIZE + 9)) == (SIZE, True)
    assert len(pool.table(request)) == 3
    pool.shrink(request, SIZE + 2)
    assert len(pool.table(request)) == 1


def test_the_ranges_of_a_chunk_that_was_computed_again_are_its_new_blocks(scheduler: ChunkScheduler) -> None:
    pool, registry, a = scheduler.pool, scheduler.registry, chunk(scheduler, "a", is_resident=True)
    for name in "12":
        ask(scheduler, name, a)
        layout: Any = pool.layout(scheduler.schedule())
        assert layout.extra.ranges[0].blocks is a.blocks
        scheduler.drop_in_flight()
        scheduler.abort(name)
        assert registry.evict(1) == 1
        pool.allocator.allocate(1)
        registry.store(a, pool.allocator.allocate(1))


def test_a_part_of_a_batch_has_the_ranges_of_its_own_sequences(scheduler: ChunkScheduler) -> None:
    a, b = chunk(scheduler, "a", 6, is_resident=True), chunk(scheduler, "b", 3, is_resident=True)
    for name, chunks in (("1", [a, b]), ("2", []), ("3", [b, a, b]), ("4", [a])):
        ask(scheduler, name, *chunks)
    layout: Any = scheduler.pool.layout(scheduler.schedule())
    assert [one[:3] for one in layout.extra.ranges] == [
        (0, 0, 6),
        (0, 6, 3),
        (2, 0, 3),
        (2, 3, 6),
        (2, 9, 3),
        (3, 0, 6),
    ]
    part = layout.part(slice(1, 3), slice(1, 3))
    assert [one[:3] for one in part.extra.ranges] == [(1, 0, 3), (1, 3, 6), (1, 9, 3)]
