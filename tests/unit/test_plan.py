"""A plan covers every key that is seen exactly once, within its capacity, whatever the batch."""

import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shared.kernels.attention.planned_tiling as tilings
from shared.attention.descriptor import DevicePlan, Grid
from shared.attention.plan import (
    IMBALANCE,
    LONG_SPLIT,
    MANY_SPLITS,
    choose_split,
    items_of,
    plan_decode,
    plan_prefill,
    smallest_split,
    state_offsets,
)
from shared.cache.layout.planned import AttentionPlanner
from shared.engine.executor.staging import Staging
from tests.comparison import assert_equal

GRIDS = st.builds(
    Grid, resident=st.integers(1, 40), unit=st.sampled_from([1, 16, 64]), least_split=st.sampled_from([32, 128])
)
LENGTHS = st.lists(st.integers(0, 300) | st.integers(0, 20_000), max_size=40)
WINDOWS = st.none() | st.integers(1, 5000)
NEW = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3000)), max_size=12)  # new tokens, past ones


def read_items(plan):
    """((request, tile of new tokens), split) of each item, in order."""
    columns = plan.request_indices, plan.query_tile_indices, plan.kv_tile_indices
    rows = zip(*(column[: int(plan.num_items[0])].tolist() for column in columns), strict=True)
    return [((request, query_tile), kv_tile) for request, query_tile, kv_tile in rows]


def splits_of(plan):
    """By (request, tile of new tokens): the splits that items read."""
    found = {}
    for tile, kv_tile in read_items(plan):
        found.setdefault(tile, []).append(kv_tile)
    return found


def check_plan(plan, grid, seen, tokens, is_prefill=True):
    """``seen`` and ``tokens``: by (request, tile), the keys that it sees and its new tokens, in order."""
    split_size, found = int(plan.split_size[0]), splits_of(plan)
    items = [(tile, n) for tile, num_seen in seen.items() for n in range(-(-max(num_seen, 1) // split_size))]
    if is_prefill and len(items) > grid.resident:  # they queue: most keys first
        units = {tile: -(-max(num_seen, 1) // grid.unit) for tile, num_seen in seen.items()}
        split = split_size // grid.unit
        items.sort(key=lambda item: -min(split, units[item[0]] - item[1] * split))
    assert_equal(read_items(plan), items, "request and tile, and split, of the items", ("item",))
    states, num_states = [], 0
    for tile, num_seen in seen.items():
        starts = range(0, max(num_seen, 1), split_size)
        for _ in range(tokens[tile]):
            states.append(num_states)
            num_states += len(starts) if len(starts) > 1 else 0
    padding = plan.num_rows - len(states)
    offsets = [*states, *[num_states] * (padding + 1)]
    assert_equal(plan.output_indptr.tolist(), offsets, f"output_indptr, {[*map(len, found.values())]} splits", ("row",))
    assert_equal(plan.num_states, num_states, "states")
    assert plan.num_items[0] <= plan.capacity, f"{plan.num_items[0]} items exceed the capacity of {plan.capacity}"
    for array in (plan.request_indices, plan.query_tile_indices, plan.kv_tile_indices):
        assert_equal(len(array), plan.capacity, "entries")
        assert not array[plan.num_items[0] :].any(), "an entry after the items is not 0"
    assert_equal({array.dtype for array in plan.arrays()}, {np.dtype(np.int32)}, "dtypes")
    assert split_size % grid.unit == 0, f"the split size {split_size} is no multiple of {grid.unit}"
    assert plan.is_split or num_states == 0, "there are states, and no sequence is called split"


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, grid=GRIDS, window=WINDOWS, padding=st.integers(0, 5))
def test_a_decode_plan_covers_each_sequence_once_and_stays_in_its_capacity(lengths, grid, window, padding):
    plan = plan_decode(lengths, grid, window=window, num_rows=len(lengths) + padding)
    seen = {(b, 0): length if window is None else min(length, window) for b, length in enumerate(lengths)}
    check_plan(plan, grid, seen, dict.fromkeys(seen, 1), is_prefill=False)
    assert_equal(plan.capacity, grid.capacity(len(lengths) + padding), "capacity")
    assert plan.num_states <= grid.max_states(), "more states than the grid allows"
    assert_equal(plan.query_indptr.tolist(), list(range(len(lengths) + padding + 1)), "query_indptr", ("row",))


@settings(max_examples=80, deadline=None)
@given(
    batch=NEW,
    grid=GRIDS,
    window=WINDOWS,
    tokens_per_tile=st.sampled_from([1, 4, 5, 32]),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 3)),
)
def test_a_prefill_plan_covers_what_each_tile_sees_once(batch, grid, window, tokens_per_tile, padding):
    """In a bucket of more rows and more sequences too."""
    new, past = [one for one, _ in batch], [one for _, one in batch]
    lengths = [one + before for one, before in batch]
    bucket = {"num_rows": sum(new) + padding[0], "num_requests": len(new) + padding[1]}
    plan = plan_prefill(new, lengths, grid, tokens_per_tile=tokens_per_tile, window=window, **bucket)
    seen, tokens = {}, {}
    for b in range(len(batch)):
        for tile, first in enumerate(range(0, new[b], tokens_per_tile)):
            last = min(first + tokens_per_tile, new[b]) - 1
            visible = [  # of the tile's first and last token, which bound the others'
                range(0 if window is None else max(0, past[b] + t - window + 1), past[b] + t + 1) for t in (first, last)
            ]
            seen[b, tile] = visible[1].stop - visible[0].start
            tokens[b, tile] = last - first + 1
    check_plan(plan, grid, seen, tokens)
    assert plan.num_rows == bucket["num_rows"]
    assert plan.num_states <= grid.max_states(tokens_per_tile)
    assert plan.capacity == grid.capacity(len(seen))
    assert np.diff(plan.query_indptr).tolist() == new + [0] * padding[1]


@settings(max_examples=80, deadline=None)
@given(
    batch=st.lists(st.tuples(st.integers(1, 40) | st.integers(1, 3000), st.integers(0, 9000)), min_size=1, max_size=40),
    shape=st.sampled_from(
        [(32, 8, 64, 2), (32, 8, 64, 4), (4, 1, 256, 2), (16, 8, 256, 2), (9, 3, 16, 4), (40, 40, 128, 2)]
    ),
    multiprocessors=st.sampled_from([4, 132]),
    window=WINDOWS,
    can_copy=st.booleans(),
)
@example(batch=[(125, 1182), (975, 29818)], shape=(16, 8, 256, 2), multiprocessors=132, window=None, can_copy=True)
def test_scratch_of_one_size_serves_whatever_a_step_brings(batch, shape, multiprocessors, window, can_copy):
    """Decoded or prefilled, by the tables of tilings: heads of queries and keys, their size, bytes a number."""
    num_heads, num_kv_heads, _, _ = shape
    new, lengths = [one for one, _ in batch], [one + before for one, before in batch]
    with mock.patch.object(tilings, "num_multiprocessors", return_value=multiprocessors):
        room = tilings.max_states(40, *shape, device=torch.device("cpu"))
        tiling = tilings.decode_tiling(len(batch), *shape[1:])
        grid = tiling.grid(num_kv_heads, torch.device("cpu"))
        assert plan_decode(lengths, grid, window=window).num_states <= room
        tiling = tilings.prefill_tiling(sum(new), len(new), *shape, can_copy)
        grid, tokens = tiling.grid(num_kv_heads, torch.device("cpu")), tiling.tokens(num_heads // num_kv_heads)
        assert tokens >= 1
        assert plan_prefill(new, lengths, grid, tokens_per_tile=tokens, window=window).num_states <= room


@settings(max_examples=80, deadline=None)
@given(
    units=st.lists(st.integers(1, 50) | st.integers(1, 1000), min_size=1, max_size=30),
    spare=st.integers(0, 60),
    least=st.integers(1, 40),
)
def test_the_search_finds_what_trying_every_split_size_finds(units, spare, least):
    budget = len(units) + spare
    slow = next(
        split
        for split in range(least, max(least, *units, 1) + 1)
        if sum(-(-one // split) for one in units) <= budget or split >= max(units)
    )
    assert_equal(
        smallest_split(np.array(units), budget, least), slow, f"split of {units}, budget {budget}, least {least}"
    )


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=60), grid=GRIDS)
@example(lengths=[16384] + [256] * 31, grid=Grid(resident=33, unit=64, least_split=128))
def test_no_program_has_more_than_a_few_times_its_share(lengths, grid):
    units = -(-np.array(lengths) // grid.unit)
    least = max(grid.least_split, min(LONG_SPLIT, max(units) * grid.unit // MANY_SPLITS))
    share = max(-(-least // grid.unit), -(-int(units.sum()) // grid.resident))
    split = choose_split(units, grid)
    assert split <= IMBALANCE * share
    assert split == share or (-(-units // split)).sum() <= grid.resident, "longer than a share only to run at once"


MANY, BATCH = Grid(resident=528, unit=64, least_split=128), np.random.default_rng(0).integers(1, 8192, 256)
H100 = Grid(resident=132, unit=64, least_split=128)  # two programs a multiprocessor, two groups of heads


@pytest.mark.parametrize(
    ("lengths", "split_size", "num_items"),
    [
        ([4096] * 32, 1024, 128),
        ([2048] * 128, 2048, 128),  # one split each fills the GPU
        ([16384], 128, 128),
        ([1024], 128, 8),  # no shorter split is worth a program
        ([16384] + [256] * 31, 256, 95),
        ([16384] + [256] * 255, 640, 281),  # more sequences than run at once: the long one is still cut
        ([2048] * 140, 2176, 140),
        ([2048] * 131 + [4096], 4096, 132),  # as many as run at once
    ],
)
def test_plans_that_can_be_checked_by_hand(lengths, split_size, num_items):
    plan = plan_decode(lengths, H100)
    assert (plan.split_size[0], plan.num_items[0]) == (split_size, num_items)


@pytest.mark.parametrize(
    ("length", "split_size"),
    [
        (320, 32),  # ten states
        (1024, 32),  # 32 states: as many as are merged in little time
        (1056, 64),
        (4096, 128),  # 32 states again, although 128 programs could run
        (8192, 128),
        (33792, 256),  # a share
    ],
)
def test_many_splits_of_a_sequence_are_not_short(length, split_size):
    plan = plan_decode([length], Grid(resident=132, unit=32, least_split=32))
    assert plan.split_size[0] == split_size


def test_an_example_in_full():
    plan = plan_decode([300, 0, 20, 130], Grid(resident=6, unit=16, least_split=64), num_rows=5)
    assert_equal(plan.split_size.tolist(), [144], "split size (128 would make 3 + 1 + 1 + 2 items, and 6 run at once)")
    assert_equal(plan.num_items.tolist(), [6], "items")
    assert_equal(plan.request_indices.tolist(), [0, 0, 0, 1, 2, 3, *[0] * 5], "request of each item", ("item",))
    assert_equal(plan.kv_tile_indices.tolist(), [0, 1, 2, 0, 0, 0, *[0] * 5], "split of each item", ("item",))
    assert_equal(plan.output_indptr.tolist(), [0, 3, 3, 3, 3, 3], "output_indptr", ("row",))
    assert plan.is_split, "a sequence of three splits is not called split"


@pytest.mark.parametrize(
    ("num_splits", "tiles", "kv_tiles"),
    [
        ([1], [0], [0]),
        ([3], [0, 0, 0], [0, 1, 2]),
        ([1, 2, 1, 3], [0, 1, 1, 2, 3, 3, 3], [0, 0, 1, 0, 0, 1, 2]),
        ([], [], []),
    ],
)
def test_items_that_can_be_checked_by_hand(num_splits, tiles, kv_tiles):
    found = items_of(np.array(num_splits, np.int64))
    assert_equal([array.tolist() for array in found], [tiles, kv_tiles], "tiles, splits", ("list", "item"))


@pytest.mark.parametrize(
    ("num_splits", "num_rows", "offsets"),
    [
        ([3], 1, [0, 3]),
        ([1, 1], 2, [0, 0, 0]),  # each item stores its result
        ([1, 2, 1, 3], 4, [0, 0, 2, 2, 5]),
        ([2, 1], 5, [0, 2, 2, 2, 2, 2]),  # three rows of padding
        ([], 2, [0, 0, 0]),
    ],
)
def test_states_that_can_be_checked_by_hand(num_splits, num_rows, offsets):
    found = state_offsets(np.array(num_splits, np.int64), num_rows)
    assert_equal(found.tolist(), offsets, "output_indptr", ("row",))
    assert_equal(found.dtype, np.int32, "dtype of output_indptr")


def test_every_token_of_a_tile_has_states_of_its_own():
    """Two tiles, of four tokens and of two, which see 68 and 70 keys: three splits each."""
    plan = plan_prefill([6], [70], Grid(5, 16, 16), tokens_per_tile=4, split_size=32)
    assert_equal(splits_of(plan), {(0, 0): [0, 1, 2], (0, 1): [0, 1, 2]}, "splits of (request, tile)", ("tile", "item"))
    assert_equal(plan.output_indptr.tolist(), [0, 3, 6, 9, 12, 15, 18], "output_indptr", ("row",))
    plan = plan_prefill([2], [70], Grid(5, 16, 16), tokens_per_tile=4, split_size=32, first_row=2, num_rows=5)
    assert plan.query_indptr.tolist() == [2, 4], "the rows of the request"
    assert plan.output_indptr.tolist() == [0, 0, 0, 3, 6, 6], "rows of other sequences first, and one of padding"


def test_where_masks_may_stand_every_tile_sees_the_window_of_the_first_token():
    """One key more, or one less, would be another split."""
    grid, options = Grid(resident=132, unit=1, least_split=1), {"tokens_per_tile": 4, "window": 8, "split_size": 1}
    for has_masks, expected in ((False, [11, 9]), (True, [11, 13])):
        plan = plan_prefill([6], [106], grid, has_masks=has_masks, **options)
        assert [len(splits) for splits in splits_of(plan).values()] == expected


def test_a_fixed_split_size_does_not_depend_on_the_other_sequences():
    alone = plan_decode([1000], H100, split_size=256)
    among = plan_decode([1000, 5000, 1], H100, split_size=256)
    assert splits_of(alone)[0, 0] == splits_of(among)[0, 0] == [0, 1, 2, 3]


def test_planning_a_large_batch_makes_few_calls_more_than_planning_one_sequence():
    """NumPy goes over the sequences; the calls that are more are steps of a binary search."""

    def num_calls(lengths):
        events, before = [], sys.getprofile()
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            plan_decode(lengths, MANY)
        finally:
            sys.setprofile(before)
        return sum(event in ("call", "c_call") for event in events)

    assert num_calls(BATCH) <= num_calls(BATCH[:1]) + 16


def test_a_plan_for_a_captured_graph_always_counts_as_split():
    assert not plan_decode([64], H100).is_split
    assert plan_decode([64], H100, is_captured=True).is_split


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_decode([1, 2], H100, num_rows=1), "2 sequences in a bucket of 1"),
        (lambda: plan_decode([500], H100, split_size=100), "must be a multiple of 64"),
        (lambda: plan_decode([500], H100, split_size=0), "must be a multiple of 64"),
        (lambda: plan_decode([100_000], H100, split_size=64), "make 1563 items; the capacity is 133"),
        (lambda: plan_prefill([9], [9], H100, tokens_per_tile=4, num_rows=8), "9 rows in a bucket of 8"),
        (lambda: plan_prefill([9], [9], H100, tokens_per_tile=4, capacity=2), "make 3 items; the capacity is 2"),
        (lambda: plan_prefill([1, 1], [9, 9], H100, tokens_per_tile=4, num_requests=1), "2 sequences in a bucket of 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_all_arrays_travel_in_one_copy_and_plans_of_a_bucket_are_of_one_size():
    first = plan_decode([3, 500], H100, num_rows=8, is_captured=True)
    second = plan_decode([16384] * 7 + [1], H100, num_rows=8, is_captured=True)
    arrays = {str(n): array for n, array in enumerate(first.arrays())}
    sent = Staging.for_arrays(torch.device("cpu"), arrays).send(arrays)
    device_plan = DevicePlan.of(first, list(sent.values()))
    assert device_plan.request_indices.tolist() == first.request_indices.tolist()
    assert (device_plan.capacity, device_plan.num_rows) == (second.capacity, second.num_rows) == (140, 8)
    assert [array.shape for array in first.arrays()] == [array.shape for array in second.arrays()]
    bucket = {"tokens_per_tile": 4, "num_rows": 32, "num_requests": 4, "capacity": 140, "is_captured": True}
    first = plan_prefill([9, 1], [900, 1], H100, **bucket)
    second = plan_prefill([8] * 4, [8] * 4, H100, **bucket)
    assert [array.shape for array in first.arrays()] == [array.shape for array in second.arrays()]
    assert first.query_indptr.tolist() == [0, 9, 10, 10, 10]


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_room_for_the_largest_batch_serves_smaller_ones_too(num_kv_heads, head_dim, itemsize):
    """Although the tiling of a smaller batch may count on more programs."""
    config = SimpleNamespace(num_heads=32, num_kv_heads=num_kv_heads, head_dim=head_dim, attention_softcap=None)
    planner, most = AttentionPlanner(config, (None,), itemsize, torch.device("cpu")), 600
    with mock.patch.object(tilings, "num_multiprocessors", return_value=132):
        states = tilings.max_states(most, 32, num_kv_heads, head_dim, itemsize, planner.device)
        items = planner.most_numbers(most, most)[2]
        for num_sequences in range(1, most + 1):
            grid = planner.decode_tiling(num_sequences).grid(num_kv_heads, planner.device)
            assert grid.max_states() <= states
            assert grid.capacity(num_sequences) <= items - most + num_sequences


def test_a_plan_serves_until_a_sequence_needs_another_tile():
    """A step's plan is that of its own lengths, and made anew only when they need it."""
    config = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=64)
    planner = AttentionPlanner(config, (None, 100), 2, torch.device("cpu"))
    lengths, num_made, last = np.array([60, 130, 710]), 0, None
    with mock.patch.object(tilings, "num_multiprocessors", return_value=132):
        grid = planner.decode_tiling(3).grid(8, planner.device)
        for _ in range(100):
            plans = planner.plan(np.ones(3, np.int64), lengths, 3).decode
            for window in planner.windows:
                whole = plan_decode(lengths, grid, window=window).arrays()
                for ours, theirs in zip(plans[window].arrays(), whole, strict=True):
                    assert_equal(ours.tolist(), theirs.tolist(), f"plan of {lengths.tolist()}, window {window}")
            num_made, last = num_made + (plans is not last), plans
            lengths = lengths + 1
    tiles = [{(n + step - 1) // grid.unit for step in range(100)} for n in (60, 130, 710)]
    assert num_made == 1 + sum(len(one) - 1 for one in tiles)
