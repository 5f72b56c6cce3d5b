"""A batch has the counts of its schedule, and a part of it is the batch of that part, for every kind of memory."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.attention.descriptor import AttentionPlan, Grid
from shared.cache.layout.paged import PagedSizes
from shared.cache.layout.planned import AttentionPlanner, LayoutPlans, StepPlans
from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.interface import step_arrays
from shared.checkpoints.shapes import SHAPES
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.kernels.attention.planned_tiling import DecodeTiling, PrefillTiling
from shared.loading.config_json import parse_config
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from tests.steps import commit, make_request, put_in_flight, step_of

SHAPE = parse_config(SHAPES["tiny-gemma3"])  # layers with a window and without: two plans a step
SIZES = PagedSizes(num_blocks=60, block_size=3, max_sequences=4, max_tokens=200, max_seq_len=40)
PLANNER = AttentionPlanner(SHAPE, tuple(dict.fromkeys(SHAPE.windows)), 4, torch.device("cpu"))
POOLS = {
    "contiguous": lambda: ContiguousKVCachePool(4, 40),
    "paged": lambda: PagedKVCachePool(60, 3, 4, 40),
    "planned": lambda: PagedKVCachePool.of(SIZES, lay_out=partial(LayoutPlans.planned, planner=PLANNER)),
}


@pytest.fixture(autouse=True, scope="module")
def small_splits() -> Any:
    """So that plans of tiny sequences have something to say."""
    with pytest.MonkeyPatch.context() as patch:
        for tiling in (DecodeTiling, PrefillTiling):
            patch.setattr(tiling, "grid", lambda *options: Grid(resident=6, unit=16, least_split=16))
        yield


def values(found: Any) -> Any:
    """All that a batch says, as Python values."""
    if isinstance(found, np.ndarray):
        return found.dtype.name, found.tolist()
    if isinstance(found, dict):
        return {key: values(value) for key, value in found.items()}
    if isinstance(found, StepPlans):
        return values(found._asdict())
    if isinstance(found, LayoutPlans | AttentionPlan) or hasattr(found, "layout") or hasattr(found, "lengths"):
        return type(found).__name__, {key: values(value) for key, value in vars(found).items()}
    return found


def test_a_piece_of_a_prompt_brings_its_own_tokens_also_if_it_is_one() -> None:
    """And not the prompt's last."""
    pool, a = POOLS["contiguous"](), make_request("a", [10, 11, 12, 13])
    pool.reserve(a, 4)
    for new, expected in ((1, [10]), (2, [11, 12]), (1, [13])):
        schedule = step_of({a: new})
        assert Batch.of(schedule, pool).token_ids.tolist() == expected
        commit(pool, schedule)


def test_a_token_in_flight_is_pending_in_its_place() -> None:
    pool, a, b, c = POOLS["contiguous"](), *(make_request(name, range(5, 8)) for name in "abc")
    for request in (a, b, c):
        pool.reserve(request, 9)
    put_in_flight(step_of({a: 3, b: 3}))
    batch = Batch.of(step_of({a: 1, b: 1, c: 3}), pool)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([0, 0, 5, 6, 7], [3, 3, 0, 1, 2])
    assert batch.pending.tolist() == [0, 1]
    late = Batch.of(step_of({b: 1, a: 1}), pool)
    rows, before = late.layout.rows.tolist(), late.token_ids.tolist()
    assert step_arrays(late)["token_ids"].tolist() == [-1 - row for row in rows]
    assert late.token_ids.tolist() == before, "a batch is left as it is"
    assert Batch.of(step_of({a: 1, b: 1}), pool).pending.tolist() == [0, 1]
    assert Batch.of(step_of({a: 1, c: 3, b: 1}), pool).layout.num_decoding == 1, "those that lead"
    a.append(99)
    batch = Batch.of(step_of({a: 1, b: 1}), pool)
    assert (batch.token_ids.tolist(), batch.pending.tolist()) == ([99, 0], [1]), "a's has arrived"


def test_the_keys_of_further_tokens_are_planned() -> None:
    pool, a = POOLS["planned"](), make_request("a", range(20))
    pool.reserve(a, 20)
    commit(pool, step_of({a: 15}))
    plans = [pool.layout(replace(step_of({a: 1}), num_ahead=n)).extra.plans.decode for n in (0, 1)]
    assert [of[None].num_items.tolist() for of in plans] == [[1], [2]], "splits of 16 keys"


def test_several_logit_rows_of_a_sequence_are_those_of_its_last_tokens() -> None:
    pool, a, b = POOLS["contiguous"](), make_request("a", [7, 8, 9]), make_request("b", [5, 6, 5])
    a.draft_ids, size = [77, 78], a.num_tokens
    pool.reserve(a, size + 2)
    pool.reserve(b, 9)
    entries = (Scheduled(a, size - 1, 3, num_drafts=2, num_logit_rows=3), Scheduled(b, 0, 2, num_logit_rows=0))
    commit(pool, step_of({a: size - 1}))
    a.num_computed_tokens = size - 1
    batch = Batch.of(Schedule(1, entries), pool)
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert batch.logit_sequences.tolist() == [0, 0, 0]
    assert step_arrays(batch)["sequence_rows"].tolist() == [batch.layout.rows[0]] * 3
    assert batch.token_ids.tolist() == [a.last_token_id, 77, 78, *b.prompt_ids[:2]]
    assert batch.positions.tolist() == [size - 1, size, size + 1, 0, 1]
    assert batch.pending.tolist() == []


def test_prompt_rows_name_the_tokens_that_follow_in_their_own_prompt() -> None:
    """Of a prompt's second and third token, after another request; a part counts from its own first token."""
    pool, other = POOLS["contiguous"](), make_request("b", [5, 6])
    asking = Request("a", [10, 11, 12, 13], SamplingParams(prompt_logprobs=2), 0)
    for request in (other, asking):
        pool.reserve(request, 9)
    entries = (Scheduled(other, 0, 2), Scheduled(asking, 1, 2, num_logit_rows=0, num_prompt_logprobs=2))
    pool.commit(asking, 1)
    asking.num_computed_tokens = 1
    batch = Batch.of(Schedule(1, entries), pool)
    found = [values(vars(each)) for each in (batch.prompt_rows, batch.part(range(1, 2)).prompt_rows)]
    same = {"next_ids": ("int64", [12, 13]), "num_top": ("int64", [2, 2])}
    assert found[0] == {"rows": ("int64", [2, 3]), "sequences": ("int64", [1, 1])} | same
    assert found[1] == {"rows": ("int64", [0, 1]), "sequences": ("int64", [0, 0])} | same
    assert batch.part(range(1)).prompt_rows is None


Sequence = st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(1, 9))  # committed, in flight, new tokens


def scheduled(pool: CachePoolProtocol, sequences: list[tuple[int, int, int]], is_decode: bool) -> Schedule:
    """Of each what is written, what is in flight, and new tokens, of which some are not known yet."""
    entries = []
    for name, (committed, in_flight, new) in zip("abcd", sequences, strict=False):
        new = 1 if is_decode else new
        start = committed + in_flight
        request = make_request(name, range(100, 100 + start + new - bool(in_flight)))
        assert pool.reserve(request, start + new)
        commit(pool, step_of({request: committed} if committed else {}))
        entries.append(Scheduled(request, start, new, num_logit_rows=min(new, 1 + committed % 3)))
    return Schedule(1, tuple(entries))


@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=60)
@given(
    sequences=st.lists(Sequence, min_size=1, max_size=4),
    is_decode=st.booleans(),
    ends=st.tuples(st.integers(0, 3), st.integers(1, 4)),
)
def test_a_part_of_a_batch_is_the_batch_of_that_part(
    kind: str, sequences: list[tuple[int, int, int]], is_decode: bool, ends: tuple[int, int]
) -> None:
    """Slots, tables, plans and pending tokens."""
    pool = POOLS[kind]()
    schedule = scheduled(pool, sequences, is_decode)
    begin = min(ends[0], len(schedule) - 1)
    part = range(begin, max(begin + 1, min(ends[1], len(schedule))))
    expected = Batch.of(replace(schedule, entries=schedule.entries[part.start : part.stop]), pool)
    batch = Batch.of(schedule, pool)
    before = values(batch)
    assert values(batch.part(part)) == values(expected)
    halves = batch.part(range(part.start)) if part.start else None
    assert halves is None or values(halves.part(range(1))) == values(batch.part(range(1))), "a part of a part"
    assert batch.part(range(len(batch))) is batch
    assert values(batch) == before


@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=30)
@given(sequences=st.lists(Sequence, min_size=1, max_size=4), is_decode=st.booleans())
def test_a_batch_does_not_change_when_the_pool_goes_on(
    kind: str, sequences: list[tuple[int, int, int]], is_decode: bool
) -> None:
    """Tokens are committed, tables grow, requests leave and others get their memory."""
    pool = POOLS[kind]()
    schedule = scheduled(pool, sequences, is_decode)
    batch = Batch.of(schedule, pool)
    parts = [batch.part(range(n, n + 1)) for n in range(len(batch))]
    before = [values(each) for each in (batch, *parts)]
    for entry in schedule:
        pool.commit(entry.request, entry.num_tokens)
        entry.request.append(7)
        pool.reserve(entry.request, 40)
    for entry in schedule:
        pool.release(entry.request)
        late = make_request("late")
        assert pool.reserve(late, 40)
        pool.commit(late, 40)
    assert [values(each) for each in (batch, *parts)] == before
