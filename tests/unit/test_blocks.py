"""The allocator of blocks: how many hold each is always known, and nothing comes back that was not handed out."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.cache.pool.blocks import BlockAllocator
from shared.errors import BlockError, ConfigError
from tests.comparison import assert_equal

NUM_BLOCKS = 8


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def state(allocator: BlockAllocator) -> tuple[list[int], list[int]]:
    """The free blocks in their order, and the counts."""
    return allocator.stack[: allocator.num_free].tolist(), allocator.ref_counts.tolist()


def test_many_are_taken_and_given_back_as_a_whole() -> None:
    allocator = BlockAllocator(5)
    assert_equal(allocator.allocate(0).tolist(), [], "no block")
    first = allocator.allocate(3)
    assert_equal(first.tolist(), [0, 1, 2], "three blocks", ("block",))
    assert_equal(first.dtype, np.int32, "dtype of the blocks")
    assert_equal(allocator.allocate(3), None, "three blocks where two are free")
    assert_equal(allocator.num_free, 2, "free blocks after a refusal")
    allocator.free(first)
    assert_equal(
        allocator.allocate(3).tolist(),
        [0, 1, 2],
        "blocks that came back, in the order in which they were held",
        ("block",),
    )
    allocator.free(blocks())
    assert_equal(allocator.audit([blocks(2, 0, 1)]), [], "audit", ("line",))


WRONG = [
    ([3], "Block 3 is free already; each holder frees a block once"),
    ([0, 3], "Block 3 is free already"),
    ([0, 7], "There is no block 7; blocks are 0 to 3"),
    ([-1], "There is no block -1; blocks are 0 to 3"),
    ([1, 0, 1], r"Blocks \[1, 0, 1\] contain a duplicate; a holder holds a block once"),
    ([2, 2], r"Blocks \[2, 2\] contain a duplicate"),  # also where it has two holders
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_cannot_come_back(wrong: list[int], message: str) -> None:
    """Nor be shared."""
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    allocator.share(blocks(2))
    before = state(allocator)
    assert_equal(before, ([3], [1, 1, 2, 0]), "free blocks, and references of each block", ("list", "block"))
    for call in (allocator.free, allocator.share):
        with pytest.raises(BlockError, match=message):
            call(blocks(*wrong))
        assert_equal(state(allocator), before, "free blocks and references after a refusal", ("list", "block"))


def test_numbers_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="number of blocks is 0"):
        BlockAllocator(0)
    with pytest.raises(BlockError, match="-1 blocks were requested"):
        BlockAllocator(1).allocate(-1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.stack.__setitem__(1, a.stack[0]), "Block 3 is free 2 times"),
        (lambda a: a.ref_counts.__setitem__(3, 1), "Block 3 is free and held"),
        (lambda a: setattr(a, "num_free", 1), "Block 2 is neither free nor held"),
        (lambda a: a.share(blocks(0)), "Block 0 has 2 references and is in 1 block tables: it leaks"),
        (lambda a: a.allocate(1), "Block 2 has 1 references and is in 0 block tables: it leaks"),
        (
            lambda a: a.free(blocks(1)),
            "Block 1 has 0 references and is in 1 block tables: it can be allocated while in use",
        ),
    ],
)
def test_the_audit_finds_damage(damage, message: str) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    assert allocator.audit([blocks(0, 1)]) == []
    damage(allocator)
    assert any(line.startswith(message) for line in allocator.audit([blocks(0, 1)]))


@pytest.mark.parametrize("tables", [[blocks(0, 1, 0)], [blocks(0, 1), blocks(0)]], ids=["one", "two"])
def test_the_audit_finds_a_block_that_stands_in_tables_once_too_often(tables: list[np.ndarray]) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    assert allocator.audit(tables) == [
        "Block 0 has 1 references and is in 2 block tables: it can be allocated while in use."
    ]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=30))
def test_any_order_of_taking_and_giving_back(steps: list[tuple[str, int]]) -> None:
    """A holder that holds something gives all of it back, one that holds nothing asks for some."""
    allocator, held = BlockAllocator(8), {}
    for holder, count in steps:
        if holder in held:
            allocator.free(held.pop(holder))
        else:
            got = allocator.allocate(count)
            assert_equal(
                got is None, count > 8 - sum(map(len, held.values())), f"{count} blocks were refused, steps {steps}"
            )
            if got is not None:
                held[holder] = got
        assert_equal(allocator.num_free, 8 - sum(map(len, held.values())), f"free blocks, steps {steps}")
        assert_equal(allocator.audit(held.values()), [], f"audit, steps {steps}", ("line",))


class Sharing(RuleBasedStateMachine):
    """Holders that also share blocks, beside a list of free blocks and the tables of the holders."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))[::-1]
        self.tables: list[list[int]] = []

    def counts(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def take(self, count: int) -> None:
        got = self.allocator.allocate(count)
        if count > len(self.free):
            assert got is None
            return
        assert got.tolist() == [self.free.pop() for _ in range(count)], "the last that came back go first"
        self.tables.append(got.tolist())

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A new holder of some blocks of any holders, in any order."""
        held = sorted(self.counts())
        chosen = data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]))
        self.allocator.share(blocks(*chosen))
        self.tables.append(chosen)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A holder gives up all that it holds, or some, in any order."""
        table = data.draw(st.sampled_from(range(len(self.tables))))
        given = data.draw(st.permutations(self.tables[table]))[: data.draw(st.integers(0, len(self.tables[table])))]
        self.allocator.free(blocks(*given))
        self.tables[table] = [block for block in self.tables[table] if block not in given]
        if not self.tables[table]:
            del self.tables[table]
        counts = self.counts()
        self.free += [block for block in given[::-1] if not counts[block]]

    @rule(named=st.lists(st.integers(-2, NUM_BLOCKS + 1), min_size=1, max_size=4), is_shared=st.booleans())
    def name_what_cannot_be(self, named: list[int], is_shared: bool) -> None:
        """A free block, one that does not exist, or one that is named twice; nothing changes."""
        if len(set(named)) == len(named) and set(named) <= set(self.counts()):
            return
        before = state(self.allocator)
        with pytest.raises(BlockError):
            (self.allocator.share if is_shared else self.allocator.free)(blocks(*named))
        assert state(self.allocator) == before

    @invariant()
    def it_is_as_the_model(self) -> None:
        counts = self.counts()
        assert state(self.allocator) == (self.free, [counts[block] for block in range(NUM_BLOCKS)])
        assert self.allocator.num_free == NUM_BLOCKS - len(counts)
        assert self.allocator.audit([blocks(*table) for table in self.tables]) == []


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=30, stateful_step_count=30)
