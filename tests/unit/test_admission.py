"""Which requests are admitted, in which order, and with how much memory."""

import pytest

from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.scheduling.admission import admit, queued
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from tests.comparison import assert_equal
from tests.steps import make_request, step_of
from tests.unit.test_prefix_pool import make, make_pool, run

MAX_SEQ_LEN = 20


def pool(num_regions: int) -> ContiguousKVCachePool:
    return ContiguousKVCachePool(num_regions, MAX_SEQ_LEN)


def static(num_regions: int, **config: object) -> Scheduler:
    return StaticScheduler(EngineConfig(batching_mode="static", **config), pool(num_regions), MAX_SEQ_LEN)


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int = 3, max_new_tokens: int = 4) -> Request:
    request = Request(name, [5] * num_prompt_tokens, SamplingParams(max_new_tokens=max_new_tokens), 0)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> None:
    """A token for each request, and the end of those that have as many as they may have."""
    schedule = scheduler.schedule()
    scheduler.commit(schedule, SampledTokens([70] * len(schedule)))
    scheduler.finish(
        [entry.request for entry in schedule if len(entry.request.output_ids) == entry.request.params.max_new_tokens]
    )


def check_queues(scheduler: Scheduler, running: list[str], waiting: list[str]) -> None:
    queues = list(scheduler.running), list(scheduler.waiting)
    assert_equal(queues, (running, waiting), "running, waiting", ("list", "request"))


# The pool.


def test_regions_are_granted_until_there_are_none() -> None:
    regions, (a, b, c) = pool(2), map(make_request, "abc")
    assert regions.reserve(a, 5), "the first of two regions was refused"
    assert regions.reserve(b, 5), "the second of two regions was refused"
    before = regions.audit()
    assert_equal(regions.reserve(c, 1), False, "reserve where no region is free")
    assert_equal(regions.audit(), before, "audit: a refusal changes nothing", ("line",))
    assert_equal(regions.free_tokens, 0, "free tokens")
    regions.release(a)
    assert_equal(regions.reserve(c, 1), True, "reserve where a region came back")
    assert_equal(
        sorted(regions.layout(step_of({b: 1, c: 1})).rows.tolist()),
        [0, 1],
        "regions of b and c: each has one",
        ("request",),
    )


def test_a_request_keeps_its_region_and_what_it_was_granted() -> None:
    regions, a = pool(3), make_request("a")
    assert regions.reserve(a, 7), "the first of three regions was refused"
    regions.commit(a, 6)
    before = regions.audit()
    assert regions.reserve(a, 2), "a smaller wish of a request that holds a region was refused"
    assert_equal(regions.audit(), before, "audit: the same region, and nothing taken back", ("line",))
    assert regions.reserve(a, 9), "a larger wish of a request that holds a region was refused"
    regions.commit(a, 3)
    assert_equal(regions.free_tokens, 2 * MAX_SEQ_LEN, "free tokens: two regions")


# The queue.


def test_the_first_requests_run_up_to_the_limit() -> None:
    scheduler = static(5, max_batch_size=3)
    requests = [add(scheduler, name) for name in "abcde"]
    step(scheduler)
    check_queues(scheduler, ["a", "b", "c"], ["d", "e"])
    assert_equal(
        [r.status for r in requests], [RequestStatus.RUNNING] * 3 + [RequestStatus.WAITING] * 2, "status", ("request",)
    )
    assert_equal([r.num_computed_tokens for r in requests], [3] * 3 + [0] * 2, "computed tokens", ("request",))
    assert_equal(len(scheduler.pool.audit()), 3, "requests that hold memory")


def test_a_refused_request_waits_and_none_overtakes() -> None:
    """a to c need two blocks of memory each and d one, and there are five."""
    config = EngineConfig(batching_mode="static", max_batch_size=4)
    scheduler = StaticScheduler(config, PagedKVCachePool(5, 4, 4), MAX_SEQ_LEN)
    for name in "abcd":
        add(scheduler, name, num_prompt_tokens=1 if name == "d" else 3, max_new_tokens=2)
    step(scheduler)
    check_queues(scheduler, ["a", "b"], ["c", "d"])
    assert_equal(scheduler.waiting["c"].status, RequestStatus.WAITING, "status of c")
    assert_equal(scheduler.pool.length(scheduler.waiting["c"]), 0, "tokens of c in memory")
    step(scheduler)
    step(scheduler)
    check_queues(scheduler, ["c", "d"], [])


def test_what_is_admitted_is_returned() -> None:
    scheduler = static(2)
    requests = [add(scheduler, name) for name in "abc"]
    assert_equal(admit(scheduler, queued(scheduler), scheduler.longest), requests[:2], "admitted", ("request",))
    assert_equal(admit(scheduler, queued(scheduler), scheduler.longest), [], "admitted when no region is free")


@pytest.mark.parametrize(("max_new_tokens", "granted"), [(1, 4), (9, 12), (500, MAX_SEQ_LEN)])
def test_a_request_is_granted_memory_for_its_longest_output(max_new_tokens: int, granted: int) -> None:
    scheduler = static(1)
    add(scheduler, "a", 3, max_new_tokens)
    scheduler.schedule()
    assert_equal(
        scheduler.pool.audit(), [f"Request a holds region 0 with 0 tokens of {granted} reserved."], "audit", ("line",)
    )


def test_cached_tokens_need_no_memory_and_a_refused_request_holds_none() -> None:
    """From phase 6 on tokens are kept free for running requests, and from phase 8 on some of a prompt are cached."""
    pool = make_pool(5)  # blocks of 4 tokens
    run(pool, make("old", "abcdefgh"))
    scheduler = StaticScheduler(EngineConfig(batching_mode="static", max_batch_size=4), pool, 64)
    new, other, small = make("new", "abcdefghijklmnop"), make("other", "abcdefghqrstuvwx"), make("small", "xyz")

    def admitted(request: Request, num_kept_free: int) -> list[Request]:
        return admit(scheduler, [request], lambda each: each.num_tokens, num_kept_free)

    for request in (new, other, small):
        scheduler.add(request)
    assert_equal(
        admitted(new, 12), [new], "admitted: 8 of 16 tokens are cached, 12 are free, and none runs", ("request",)
    )
    assert_equal(
        (new.num_computed_tokens, pool.granted[pool.rows[new]]), (8, 16), "computed and reserved tokens of new"
    )
    assert_equal(admitted(other, 0), [], "admitted: 8 more tokens are needed and 4 are free", ("request",))
    assert_equal([each.request_id for each in pool.rows], ["old", "new"], "requests that hold memory", ("request",))
    assert_equal(admitted(small, 2), [], "admitted: 3 of 4 free tokens are needed, 2 must stay free", ("request",))
    assert_equal(admitted(small, 1), [small], "admitted: 3 of 4 free tokens are needed, 1 must stay free", ("request",))
