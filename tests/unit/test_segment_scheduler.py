"""Which segments are computed when: before the request that lacks them, once, and past no request before it."""

from typing import Any

import pytest

from shared.cache.layout.paged import PagedSizes
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.tracks.segments.pool import segment_pool
from shared.tracks.segments.registry import Segment, SegmentRegistry
from shared.tracks.segments.scheduler import SegmentScheduler
from tests.comparison import assert_equal

SIZE = 4


@pytest.fixture
def scheduler() -> SegmentScheduler:
    registry = SegmentRegistry()
    pool = segment_pool(PagedSizes(24, SIZE, 4, 64, 80), registry, True)
    return SegmentScheduler(EngineConfig(max_batch_size=4, prefill_chunk_size=4), pool, 80, registry)


def segment(scheduler: SegmentScheduler, letter: str, count: int = SIZE, is_resident: bool = False) -> Segment:
    found = scheduler.registry.add("user", [ord(letter)] * count)
    if is_resident:
        blocks = scheduler.pool.allocator.allocate(-(-count // SIZE))
        assert blocks is not None, "the pool of the test is too small"
        scheduler.registry.store(found, blocks)
    return found


def ask(scheduler: SegmentScheduler, name: str, *segments: Segment) -> Request:
    ids = [token_id for one in segments for token_id in one.token_ids] + [7]
    request = Request(name, ids, SamplingParams(max_new_tokens=4), 0)
    if segments:
        scheduler.registry.contexts[request] = segments
    scheduler.add(request)
    return request


def queue(scheduler: SegmentScheduler) -> list[str]:
    """The waiting requests; one that computes a segment by the letter of the segment."""
    computing = scheduler.registry.computing
    return [
        chr(computing[request].token_ids[0]) if request in computing else request.request_id
        for request in scheduler.waiting.values()
    ]


def commit(scheduler: SegmentScheduler, schedule: Schedule) -> None:
    count = sum(entry.num_logit_rows for entry in schedule)
    scheduler.commit(schedule, SampledTokens([5] * count, None, {}))


def test_missing_segments_stand_directly_before_the_request_that_lacks_them(scheduler: SegmentScheduler) -> None:
    """Those before it keep their place, and their segments; only the first that lacks any has them computed."""
    a, b, c = (segment(scheduler, letter) for letter in "abc")
    d = segment(scheduler, "d", is_resident=True)
    e = segment(scheduler, "e", is_resident=True)
    ask(scheduler, "1", e)
    ask(scheduler, "2", b, d, a, b)
    ask(scheduler, "3", c)
    ask(scheduler, "4")
    scheduler.put_missing_segments_first()
    assert_equal(queue(scheduler), ["1", "b", "a", "2", "3", "4"], "queue", ("place",))
    assert_equal(list(scheduler.registry.resident.values()), [e, d], "resident, the last used last", ("place",))
    schedule = scheduler.schedule()
    assert_equal(len(schedule), 3, "requests of the step: the first, and two that compute segments")
    assert_equal(queue(scheduler), ["2", "3", "4"], "queue", ("place",))


def test_what_is_being_computed_is_not_asked_for_again(scheduler: SegmentScheduler) -> None:
    a, b = segment(scheduler, "a"), segment(scheduler, "b")
    scheduler.registry.want(b)
    ask(scheduler, "1", a)
    ask(scheduler, "2", a, b)
    commit(scheduler, scheduler.schedule())  # b was wanted and joined the end of the queue, after what waits
    assert a.is_resident, "segment a was computed"
    assert not b.is_resident, "segment b was computed before the request that lacks a"
    assert_equal(queue(scheduler), ["1", "2", "b"], "queue", ("place",))
    scheduler.put_missing_segments_first()
    assert_equal(queue(scheduler), ["1", "b", "2"], "queue: what computes b has moved", ("place",))
    commit(scheduler, scheduler.schedule())
    scheduler.put_missing_segments_first()
    assert_equal(queue(scheduler), ["2"], "queue", ("place",))
    assert b.is_resident, "segment b was computed"
    commit(scheduler, scheduler.schedule())
    assert "2" in scheduler.running, "request 2 has all its segments and runs"
    assert_equal(scheduler.pool.audit_blocks(), [], "audit of the blocks", ("line",))


def test_all_that_is_wanted_is_computed_under_ids_that_no_request_has(scheduler: SegmentScheduler) -> None:
    a, b, c = (segment(scheduler, letter) for letter in "abc")
    ask(scheduler, f"segment {a.segment_id}")
    ask(scheduler, f"segment {a.segment_id}+")
    for one in (a, b, c):
        scheduler.registry.want(one)
    scheduler.schedule()
    ids = {segment: request.request_id for request, segment in scheduler.registry.computing.items()}
    expected = {a: f"segment {a.segment_id}++", b: f"segment {b.segment_id}", c: f"segment {c.segment_id}"}
    assert_equal(ids, expected, "ids of what computes them", ("segment",))


def test_a_segment_that_a_running_request_computes_moves_nothing(scheduler: SegmentScheduler) -> None:
    a, b = segment(scheduler, "a", 3 * SIZE), segment(scheduler, "b")
    scheduler.registry.want(a)
    commit(scheduler, scheduler.schedule())
    assert not a.is_resident, "the segment has three chunks, of which one is computed"
    assert_equal(queue(scheduler), [], "queue: what computes a runs", ("place",))
    ask(scheduler, "1", a, b)
    scheduler.put_missing_segments_first()
    assert_equal(queue(scheduler), ["b", "1"], "queue: what computes a still runs", ("place",))


def test_without_missing_segments_the_queue_stays_as_it_is(scheduler: SegmentScheduler) -> None:
    a = segment(scheduler, "a", is_resident=True)
    ask(scheduler, "1")
    ask(scheduler, "2", a)
    scheduler.put_missing_segments_first()
    assert_equal(queue(scheduler), ["1", "2"], "queue", ("place",))
    assert not scheduler.registry.computing, "a segment is computed that no request lacks"


@pytest.mark.parametrize("end", ["failure", "abort"])
def test_requests_fail_with_a_segment_that_they_wait_for_and_stay_if_it_is_aborted(
    scheduler: SegmentScheduler, end: str
) -> None:
    """A client's request, waiting or running, may have the name of the one that computes."""
    a = segment(scheduler, "a")
    named = ask(scheduler, f"segment {a.segment_id}")
    if end == "failure":
        commit(scheduler, scheduler.schedule())
    waiting = ask(scheduler, "1", a)
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


def test_wanted_segments_are_work(scheduler: SegmentScheduler) -> None:
    assert not scheduler.has_work()
    scheduler.registry.want(segment(scheduler, "a"))
    assert scheduler.has_work()


def test_a_segment_is_complete_with_its_last_token_and_takes_nothing_from_the_prefix_tree(
    scheduler: SegmentScheduler,
) -> None:
    pool, plain = scheduler.pool, Request("p", [ord("a")] * 9, SamplingParams(), 0)
    assert (pool.admit(plain), pool.reserve(plain, 9)) == (0, True)
    pool.commit(plain, 9)
    a = segment(scheduler, "a", 9)
    scheduler.registry.want(a)
    for start in (0, 4, 8):
        assert not a.is_resident
        (entry,) = schedule = scheduler.schedule()
        assert entry.start == start, "a segment is computed as a whole"
        commit(scheduler, schedule)
    assert a.is_resident


def test_segments_are_evicted_last_and_a_request_s_tokens_count_from_the_first(scheduler: SegmentScheduler) -> None:
    pool, a, plain = scheduler.pool, segment(scheduler, "a", is_resident=True), ask(scheduler, "p")
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
    pool.release(request)
    assert pool.reserve(plain, 80)
    assert [(pool.reserve(request, 4 * count), a.is_resident) for count in (5, 4)] == [(False, True), (True, False)]


def test_the_ranges_of_a_segment_that_was_computed_again_are_its_new_blocks(scheduler: SegmentScheduler) -> None:
    pool, registry, a = scheduler.pool, scheduler.registry, segment(scheduler, "a", is_resident=True)
    for name in "12":
        ask(scheduler, name, a)
        layout: Any = pool.layout(scheduler.schedule())
        assert layout.extra.ranges[0].blocks is a.blocks
        scheduler.drop_in_flight()
        scheduler.abort(name)
        assert registry.evict(1) == 1
        pool.allocator.allocate(1)
        registry.store(a, pool.allocator.allocate(1))


def test_a_part_of_a_batch_has_the_ranges_of_its_own_sequences(scheduler: SegmentScheduler) -> None:
    a, b = segment(scheduler, "a", 6, is_resident=True), segment(scheduler, "b", 3, is_resident=True)
    for name, segments in (("1", [a, b]), ("2", []), ("3", [b, a, b]), ("4", [a])):
        ask(scheduler, name, *segments)
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
