"""The allocator of blocks: who holds what is always known, and nothing comes back that was not handed out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cache.blocks import BlockAllocator
from shared.errors import BlockError, ConfigError


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_blocks_are_handed_out_once_and_the_last_back_goes_first() -> None:
    allocator = BlockAllocator(3)
    assert [allocator.allocate("a"), allocator.allocate("b"), allocator.allocate("a")] == [0, 1, 2]
    assert allocator.allocate("c") is None
    allocator.free(0, "a")
    allocator.free(2, "a")
    assert allocator.num_free == 2
    assert [allocator.allocate("c"), allocator.allocate("c")] == [2, 0]
    assert allocator.owners.tolist() == ["c", "b", "c"]


def test_many_are_taken_and_given_back_as_a_whole() -> None:
    allocator = BlockAllocator(5)
    assert allocator.allocate_many(0, "a").tolist() == []
    first = allocator.allocate_many(3, "a")
    assert first.tolist() == [0, 1, 2]
    assert first.dtype == np.int32
    assert allocator.allocate_many(3, "b") is None
    assert allocator.num_free == 2
    allocator.free_many(first, "a")
    assert allocator.allocate_many(3, "b").tolist() == [0, 1, 2], "in the order in which they were held before"
    allocator.free_many(blocks(), "b")
    assert allocator.audit({"b": blocks(2, 0, 1)}) == []


@pytest.mark.parametrize(
    ("given_back", "message"),
    [
        ([3], "a gives back block 3, which is free already"),
        ([0, 2], "a gives back block 2, which b holds; only that one can"),
        ([0, 7], "a gives back block 7; there are blocks 0 to 3"),
        ([-1], "a gives back block -1; there are blocks 0 to 3"),
        ([1, 0, 1], r"a gives back blocks \[1, 0, 1\], one of them twice"),
    ],
)
def test_what_cannot_come_back(given_back: list[int], message: str) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate_many(2, "a")
    allocator.allocate("b")
    with pytest.raises(BlockError, match=message):
        allocator.free_many(blocks(*given_back), "a")
    if len(given_back) == 1:
        with pytest.raises(BlockError, match=message):
            allocator.free(given_back[0], "a")
    assert allocator.audit({"a": blocks(0, 1), "b": blocks(2)}) == [], "nothing has changed"
    assert allocator.num_free == 1


def test_twice_is_once_too_often() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate("a")
    assert block is not None
    allocator.free(block, "a")
    with pytest.raises(BlockError, match="free already"):
        allocator.free(block, "a")
    assert allocator.num_free == 2


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="number of blocks is 0"):
        BlockAllocator(0)
    with pytest.raises(BlockError, match="a asks for -1 blocks"):
        BlockAllocator(1).allocate_many(-1, "a")


def test_leaks_are_the_blocks_of_the_dead() -> None:
    allocator = BlockAllocator(6)
    for owner in "abcab":
        allocator.allocate(owner)
    leaks = allocator.leaks({"b"})
    assert {owner: held.tolist() for owner, held in leaks.items()} == {"a": [0, 3], "c": [2]}
    for owner, held in leaks.items():
        allocator.free_many(held, owner)
    assert allocator.leaks({"b"}) == {}
    assert allocator.num_free == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.stack.__setitem__(1, a.stack[0]), "Block 3 is free 2 times"),
        (lambda a: a.owners.__setitem__(3, "a"), "Block 3 is free and held by a"),
        (lambda a: setattr(a, "num_free", 1), "Block 2 is neither free nor held"),
        (lambda a: a.owners.__setitem__(0, "b"), "Block 0 stands in the table of a and is held by b"),
        (lambda a: a.allocate("c"), "Block 2 is held by c and stands in no table"),
    ],
)
def test_the_audit_finds_damage(damage, message: str) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate_many(2, "a")
    assert allocator.audit({"a": blocks(0, 1)}) == []
    damage(allocator)
    assert any(line.startswith(message) for line in allocator.audit({"a": blocks(0, 1)}))


def test_the_audit_finds_a_block_that_stands_in_two_tables() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate_many(2, "a")
    assert allocator.audit({"a": blocks(0, 1, 0)}) == ["Block 0 stands in tables 2 times."]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=30))
def test_any_order_of_taking_and_giving_back(steps: list[tuple[str, int]]) -> None:
    """An owner that holds something gives all of it back, one that holds nothing asks for some."""
    allocator, held = BlockAllocator(8), {}
    for owner, count in steps:
        if owner in held:
            allocator.free_many(held.pop(owner), owner)
        else:
            got = allocator.allocate_many(count, owner)
            assert (got is None) == (count > 8 - sum(map(len, held.values())))
            if got is not None:
                held[owner] = got
        assert allocator.num_free == 8 - sum(map(len, held.values()))
        assert allocator.audit(held) == []
        assert set(allocator.leaks(())) == {owner for owner, mine in held.items() if len(mine)}
