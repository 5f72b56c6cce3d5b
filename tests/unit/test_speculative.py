"""What is kept of a step with drafts: how many are accepted, and what the commit leaves behind."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.config import EngineConfig
from shared.engine.request import Request, TokenLogprobs
from shared.engine.sampling.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.scheduling import speculative
from shared.scheduling.drafts import num_equal, settle
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.speculative import SpeculativeScheduler
from shared.tracks.multi_token import scheduler as multi_token
from tests.comparison import assert_equal

MAX_SEQ_LEN, BLOCK_SIZE, LENGTH = 32, 2, 4
ANSWER = [30, 31, 32, 33, 34, 35, 36, 37]
WRONG = 99


def make_scheduler(kind: Any = SpeculativeScheduler, **options: Any) -> Any:
    options = {"use_speculative_decoding": True, "drafter": "ngram", "adapt_spec_length": False} | options
    config = EngineConfig(spec_length=LENGTH, max_batch_size=4, **options)
    return kind(config, PagedKVCachePool(40, BLOCK_SIZE, 4, MAX_SEQ_LEN), MAX_SEQ_LEN)


def add(scheduler: SpeculativeScheduler, name: str) -> Request:
    params = SamplingParams(max_new_tokens=len(ANSWER), ignore_eos=True, logprobs=0)
    request = Request(name, [1, 2, 3], params, 0)
    scheduler.add(request)
    return request


def step(scheduler: SpeculativeScheduler, drafts: Sequence[Sequence[int]] = (), failing: int = -1) -> None:
    """Each request proposes its own drafts, or none, and draws what a model does whose answer is ``ANSWER``: after a
    wrong draft any token. The request at ``failing`` cannot be computed."""
    schedule = scheduler.schedule()
    starts = [entry.request.num_computed_tokens for entry in schedule]
    assert_equal([entry.start for entry in schedule], starts, "where each goes on", ("request",))
    for entry, ids in zip(schedule, drafts, strict=False):
        entry.request.draft_ids = list(ids)
    if schedule.has_drafts:
        schedule = settle(schedule, scheduler.pool)
    drawn, errors = [], {failing: RuntimeError("injected")} if failing >= 0 else {}
    for number, entry in enumerate(schedule):
        if number in errors:
            continue
        done = len(entry.request.output_ids)
        expected = ANSWER[done : done + entry.num_logit_rows]
        num_right = num_equal_to(expected, entry.request.draft_ids[: entry.num_drafts])
        drawn += expected[: num_right + 1] + [WRONG] * (entry.num_logit_rows - num_right - 1)
    logprobs: list[TokenLogprobs | None] = [TokenLogprobs(-float(token_id), ()) for token_id in drawn]
    scheduler.commit(schedule, SampledTokens(drawn, logprobs, errors))


def num_equal_to(expected: Sequence[int], drafts: Sequence[int]) -> int:
    return max(n for n in range(len(drafts) + 1) if list(expected[:n]) == list(drafts[:n]))


def counts(scheduler: SpeculativeScheduler, request: Request) -> dict[str, int]:
    pool = scheduler.pool
    return {
        "tokens in the cache": pool.length(request),
        "computed tokens": request.num_computed_tokens,
        "scheduled tokens": request.num_scheduled_tokens,
        "pending tokens": request.num_pending_tokens,
        "free tokens": pool.free_tokens,
    }


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    drawn = [7, 8, 9, 5]
    for drafts, expected in (([7, 8, 9], 3), ([7, 8, 1], 2), ([7, 1, 9], 1), ([1, 8, 9], 0), ([8, 9, 5], 0), ([], 0)):
        assert_equal(num_equal(drawn[: len(drafts) + 1], drafts), expected, f"of the drafts {drafts} for {drawn}")


def test_a_run_ends_before_a_token_that_may_end_the_output() -> None:
    for end, expected in ((7, 0), (8, 1), (9, 2), (5, 3)):
        assert_equal(num_equal([7, 8, 9, 5], [7, 8, 9], (2, end)), expected, f"of three equal drafts, {end} is an end")
    assert_equal(num_equal([7, 8, 9, 5], [7, 1, 1], (8,)), 1, "of drafts that differ where an end is drawn")


def test_all_short_runs_are_accepted_as_their_longest_equal_prefix() -> None:
    for drawn in product(range(2), repeat=4):
        for drafts in product(range(2), repeat=3):
            assert_equal(num_equal(drawn, drafts), num_equal_to(drawn, drafts), f"of the drafts {drafts} for {drawn}")


@pytest.mark.parametrize("num_right", range(LENGTH + 1))
def test_a_step_gives_a_token_more_than_it_accepts(num_right: int) -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a")
    step(scheduler)
    drafts = [*ANSWER[1 : 1 + num_right], WRONG, *ANSWER[2 + num_right :]][:LENGTH]
    request.num_forced_drafts = 2  # the last two
    step(scheduler, [drafts])
    assert_equal(request.output_ids, ANSWER[: num_right + 2], "outputs")
    assert_equal(request.num_accepted_drafts, num_right, "accepted drafts")
    assert_equal(request.num_rejected_drafts, LENGTH - num_right, "rejected drafts")
    assert_equal(scheduler.num_accepted_forced_drafts, max(num_right - 2, 0), "accepted drafts that were forced")
    by_position = [1] * num_right + [0] * (LENGTH - num_right)
    assert_equal(scheduler.num_accepted_by_position, by_position, "accepted drafts", ("position",))
    assert_equal(scheduler.num_drafts_by_position, [1] * LENGTH, "verified drafts", ("position",))


@pytest.mark.parametrize("num_right", range(LENGTH + 1))
def test_a_rejected_draft_leaves_no_trace(num_right: int) -> None:
    """Counts and memory are those of a request that has decoded the same tokens one at a time."""
    scheduler, plain = make_scheduler(), make_scheduler()
    request, other = add(scheduler, "a"), add(plain, "a")
    step(scheduler)
    drafts = [*ANSWER[1 : 1 + num_right], WRONG, *ANSWER[2 + num_right :]][:LENGTH]
    step(scheduler, [drafts])
    for _ in range(num_right + 2):
        step(plain, [[]])
    assert_equal(counts(scheduler, request), counts(plain, other), f"after {num_right} right drafts", ("the",))


def test_a_request_that_fails_beside_drafts_takes_nothing_from_the_others() -> None:
    scheduler = make_scheduler()
    requests = [add(scheduler, name) for name in "abc"]
    step(scheduler)
    step(scheduler, [[31, 32, WRONG], [31, 32], [31, WRONG]], failing=1)
    assert_equal([request.output_ids for request in requests], [ANSWER[:4], ANSWER[:1], ANSWER[:3]], "outputs")
    assert_equal(scheduler.verified, [("a", 2, 1), ("c", 1, 1)], "verified drafts", ("request",))
    assert_equal(list(scheduler.running), ["a", "c"], "running")
    step(scheduler, [[WRONG], []])
    assert_equal(scheduler.verified, [("a", 0, 1)], "verified drafts of the next step", ("request",))


def test_drafts_take_what_the_budget_leaves_and_stand_behind_single_tokens() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    for name in "abcd":
        add(scheduler, name)
    while scheduler.waiting or any(request.is_prefilling for request in scheduler.running.values()):
        step(scheduler)
    planned = [(entry.request.request_id, entry.num_drafts) for entry in scheduler.schedule()]
    assert_equal(planned, [("b", 0), ("c", 0), ("d", 0), ("a", 2)], "drafts of four requests and six tokens")


@pytest.mark.parametrize("num_wanted", [0, 2])
def test_each_step_asks_anew_how_many_drafts_to_plan(num_wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that had none, and after one that was interrupted while it was planned."""
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler)
    with monkeypatch.context() as patch:
        asked: list[int] = []
        patch.setattr(
            scheduler.lengths, "next_lengths", lambda requests: asked.append(0) or [num_wanted] * len(requests)
        )
        if num_wanted:
            patch.setattr(speculative, "grow", lambda owner, decoding: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                scheduler.schedule()
            scheduler.drop_in_flight()
        else:
            step(scheduler)
        assert_equal(len(asked), 1, "times that a step asks")
    add(scheduler, "b")
    planned = [(entry.request.request_id, entry.num_drafts) for entry in scheduler.schedule()]
    assert_equal(planned, [("a", LENGTH), ("b", 0)], "drafts beside a prompt")


def test_a_step_with_drafts_asks_once_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler)
    asked, next_lengths = list[int](), scheduler.lengths.next_lengths
    monkeypatch.setattr(scheduler.lengths, "next_lengths", lambda some: asked.append(len(some)) or next_lengths(some))
    assert scheduler.schedule().has_drafts
    assert_equal(asked, [1], "requests of which the numbers are asked", ("time",))


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (speculative, {}, [1, 1, 1, 0, 0, 1, 1]),
        (multi_token, {}, [1, 1, 1, 0, 0, 1, 1]),
        (multi_token, {"drafter": None, "adapter": "a"}, [1, 1, 1, 1, 0, 0, 1]),  # masks are no drafts
    ],
)
def test_the_common_step_is_tried_unless_the_step_before_had_drafts(module, options, expected, monkeypatch) -> None:
    kind = getattr(module, "SpeculativeScheduler" if module is speculative else "MultiTokenScheduler")
    scheduler, tried, only_decoding = make_scheduler(kind, **options), list[int](), module.only_decoding
    monkeypatch.setattr(module, "only_decoding", lambda *some: tried.append(1) or only_decoding(*some))
    add(scheduler, "a")
    found = []
    for num_wanted in (0, 0, 1, 1, 0, 0, 0):
        tried.clear()
        monkeypatch.setattr(scheduler.lengths, "next_lengths", lambda some, n=num_wanted: [n] * len(some))
        step(scheduler)
        found.append(len(tried))
    assert_equal(found, expected, "attempts", ("step",))


def test_a_request_aborted_while_its_drafts_are_verified_counts_none_and_the_others_keep_theirs() -> None:
    scheduler = make_scheduler()
    aborted, other = add(scheduler, "a"), add(scheduler, "b")
    scheduler.add(Request("c", [1, 2, 3], SamplingParams(use_speculative_decoding=False), 0))
    step(scheduler)
    schedule = scheduler.schedule()
    granted = {entry.request.request_id: entry.num_drafts for entry in schedule}
    assert_equal(granted, {"a": LENGTH, "b": LENGTH, "c": 0}, "drafts, of which c wants none")
    aborted.draft_ids = other.draft_ids = ANSWER[1 : 1 + LENGTH]
    scheduler.abort("a")
    drawn = [token_id for entry in schedule for token_id in ANSWER[1 : 1 + entry.num_logit_rows]]
    scheduler.commit(schedule, SampledTokens(drawn, None, {}))
    assert_equal(aborted.output_ids, ANSWER[:1], "outputs of the aborted request")
    assert_equal(other.output_ids, ANSWER[: 2 + LENGTH], "outputs of the other")
    assert_equal(scheduler.num_drafts_by_position, [1] * LENGTH, "verified drafts", ("position",))
    assert_equal(scheduler.pool.free_tokens, (40 - 4 - 2) * BLOCK_SIZE, "free tokens beside 8 and 4")


def test_a_logit_row_is_told_the_draft_that_it_verifies() -> None:
    request = add(make_scheduler(), "a")
    request.draft_ids = [31, 32, 33]
    rows = Schedule(1, (Scheduled(request, 2, 3, num_drafts=2, num_logit_rows=3),), 1).sampling_rows()
    assert_equal([(row.index, row.draft_id) for row in rows], [(0, 31), (1, 32), (2, None)], "rows of two drafts")


def test_requests_of_one_step_keep_their_own_tokens() -> None:
    scheduler = make_scheduler()
    requests = [add(scheduler, name) for name in "abc"]
    step(scheduler)
    step(scheduler, [[31, 32, WRONG, 34], [], [WRONG]])
    step(scheduler, [[], [32], []])
    assert_equal([len(request.output_ids) for request in requests], [5, 4, 3], "outputs", ("request",))
    for request in requests:
        assert_equal(request.output_ids, ANSWER[: len(request.output_ids)], f"outputs of {request.request_id}")
        logprobs = [each and each.logprob for each in request.output_logprobs]
        expected = [-token_id for token_id in request.output_ids]
        assert_equal(logprobs, expected, f"log-probabilities of {request.request_id}", ("token",))
