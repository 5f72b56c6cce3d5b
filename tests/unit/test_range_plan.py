"""A plan over ranges shows every query each of its visible keys once, and stays within its limits."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.attention.descriptor import Grid
from shared.tracks.segments.range_plan import RangeLimits, RangePlan, plan_ranges
from shared.tracks.segments.range_tiles import LEAST_SAVED, Ranges, Tiles


def ranges_of(contexts: list[list[int]], sizes: list[int]) -> tuple[Ranges, list[int]]:
    """Sequences made of segments of these sizes, 4 tokens a block; and how long each sequence's segments are."""
    first_blocks = np.cumsum([0, *sizes])
    found, lengths = [], []
    for sequence, segments in enumerate(contexts):
        offset = 0
        for segment in segments:
            blocks = first_blocks[segment] + np.arange(-(-sizes[segment] // 4), dtype=np.int32)
            found.append(SimpleNamespace(sequence=sequence, offset=offset, length=sizes[segment], blocks=blocks))
            offset += sizes[segment]
        lengths.append(offset)
    return Ranges.of(found), lengths


def keys_of(plan: RangePlan, positions: np.ndarray, ranges: Ranges, window: int) -> dict[int, list[tuple[int, int]]]:
    """What the kernel would show each row: (table, key) in the order of items; a sequence's own table is negative."""
    shown: dict[int, list[tuple[int, int]]] = {}
    states: set[int] = set()
    for item in range(int(plan.num_items[0])):
        for slot in range(plan.item_slots[item], plan.item_slots[item] + plan.item_counts[item]):
            row = int(plan.slot_rows[slot])
            if plan.slot_states[slot] >= 0:
                state = int(plan.slot_states[slot] + plan.item_splits[item])
                assert plan.output_indptr[row] <= state < plan.output_indptr[row + 1], "the state is the row's"
                assert state not in states, "two items store the same state"
                states.add(state)
            else:
                assert plan.output_indptr[row] == plan.output_indptr[row + 1], "a whole row has no states"
            for piece in range(plan.item_pieces[item], plan.item_pieces[item + 1]):
                place = positions[row] - plan.piece_bases[piece] - plan.slot_offsets[slot]
                for key in range(plan.piece_begins[piece], min(plan.piece_ends[piece], place + 1)):
                    if key > place - window:
                        table = int(plan.piece_tables[piece])
                        turn = int(plan.piece_turns[piece] + plan.slot_offsets[slot])
                        assert turn == (0 if table < 0 else positions[row] - place), "the turn is the range's offset"
                        shown.setdefault(row, []).append((table, int(key)))
    assert len(states) == plan.num_states
    return shown


@given(st.data())
def test_each_visible_key_is_in_one_item(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 5, 64, 130, 300]), min_size=1, max_size=4), "sizes")
    some = st.lists(st.integers(0, len(sizes) - 1), max_size=4)
    contexts = [[0], *data.draw(st.lists(some, max_size=4), "contexts")]
    ranges, lengths = ranges_of(contexts, sizes)
    B = len(contexts)
    num_new = np.array(data.draw(st.lists(st.integers(1, 9), min_size=B, max_size=B), "new"))
    before = np.array(data.draw(st.lists(st.integers(0, 200), min_size=B, max_size=B), "own tokens before"))
    slack = data.draw(st.integers(0, 40), "slack")
    window = data.draw(st.sampled_from([None, 1, 70, 400]), "window")
    tokens = data.draw(st.integers(1, 6), "tokens per tile")
    most = data.draw(st.sampled_from([0, 8, 1000]), "shared slots")
    grid = Grid(data.draw(st.integers(1, 9), "resident"), 32, 64)
    sequences = np.arange(B).repeat(num_new)
    begins = (num_new.cumsum() - num_new)[sequences]
    positions = np.array(lengths)[sequences] + before[sequences] + np.arange(len(sequences)) - begins
    least = positions - np.minimum(slack, before[sequences])
    tiles = Tiles.of(ranges, num_new, tokens, most)
    plan = plan_ranges(tiles, least, positions + slack, grid, num_rows=len(positions) + 3, window=window)
    shown = keys_of(plan, positions, ranges, window or 10**9)
    for item in range(int(plan.num_items[0])):  # no keys are read that lie before the windows of all queries
        slots = slice(plan.item_slots[item], plan.item_slots[item] + plan.item_counts[item])
        lowest = (least[plan.slot_rows[slots]] - plan.slot_offsets[slots]).min()
        pieces = slice(plan.item_pieces[item], plan.item_pieces[item + 1])
        first_seen = lowest - plan.piece_bases[pieces] + 1 - (window or 10**9)
        assert (plan.piece_begins[pieces] >= first_seen).all()
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        expected = []
        for n in np.flatnonzero(ranges.sequences == sequence):
            table, offset = int(ranges.table_starts[ranges.segments[n]]), ranges.offsets[n]
            expected += [(table, j) for j in range(ranges.lengths[n]) if offset + j >= first]
        own = lengths[sequence]
        expected += [(-1 - int(sequence), j - own) for j in range(max(own, first), position + 1)]
        assert sorted(shown[row]) == sorted(expected)
    limits = RangeLimits.of(len(positions) + 3, grid, tokens)
    assert len(plan.slot_rows) <= len(positions) + most
    if most <= 8:
        assert plan.num_states <= limits.states
    assert limits.hold(plan) or len(plan.piece_tables) > limits.pieces or most > 8


@pytest.mark.parametrize(
    ("num_sequences", "size", "most", "is_shared"),
    [(8, 1000, 8, True), (8, 1000, 7, False), (8, LEAST_SAVED // 8, 8, False), (5, 64, 100, True), (5, 63, 100, False)],
)
def test_a_shared_segment_is_read_once_for_all_if_that_saves_enough(
    num_sequences: int, size: int, most: int, is_shared: bool
) -> None:
    """And has slots for all its queries; a short one is read for each sequence."""
    places = np.full(num_sequences, 1000)
    ranges, lengths = ranges_of([[0]] * num_sequences, [size])
    tiles = Tiles.of(ranges, np.ones(num_sequences, np.int64), 16, most)
    plan = plan_ranges(tiles, places + lengths, places + lengths, Grid(1, 64, 64), num_rows=num_sequences)
    read = (plan.piece_ends - plan.piece_begins)[plan.piece_tables >= 0].sum()
    assert read == (size if is_shared else num_sequences * size)
    assert len(set(plan.item_slots.tolist())) == num_sequences + is_shared
    sizes = len(plan.slot_rows), len(plan.item_slots), len(plan.piece_tables), plan.num_states
    exact = RangeLimits(num_sequences, *sizes)
    assert exact.hold(plan)
    for name, size in vars(exact).items():
        assert not replace(exact, **{name: size - 1}).hold(plan), f"{name} are too few"


def test_limits_of_two_kinds_of_plans() -> None:
    assert RangeLimits(1, 2, 3, 4, 5) | RangeLimits(5, 4, 3, 2, 1) == RangeLimits(5, 4, 3, 4, 5)


def test_a_small_step_has_slots_for_many_shared_segments() -> None:
    ranges, lengths = ranges_of([list(range(32))] * 2, [LEAST_SAVED] * 32)
    grid, positions = Grid(1, 64, 64), np.array(lengths)
    limits = RangeLimits.of(2, grid, 16)
    tiles = Tiles.of(ranges, np.ones(2, np.int64), 16, limits.slots - limits.rows)
    assert tiles.counts.tolist() == [1, 1] + [2] * 32
    assert limits.hold(plan_ranges(tiles, positions, positions, grid, num_rows=2))


def test_of_segments_whose_queries_are_too_many_those_that_save_most_are_shared() -> None:
    """In three sequences, each with both segments, of whose queries three may be shared."""
    ranges, _ = ranges_of([[0, 1]] * 3, [LEAST_SAVED, 2 * LEAST_SAVED])
    tiles = Tiles.of(ranges, np.ones(3, np.int64), 4, 3)
    assert tiles.counts.tolist() == [1, 1, 1, 3]
    assert tiles.lengths[-1] == 2 * LEAST_SAVED
