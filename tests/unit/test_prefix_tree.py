"""The radix tree of blocks, by examples and beside a dictionary of prefixes."""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.cache.pool.prefix_tree import ID_BYTES, Node, PrefixTree
from tests.comparison import assert_equal

SIZE = 2  # tokens of a block


def pack(ids: str) -> bytes:
    """A letter is a token."""
    return array("i", map(ord, ids)).tobytes()


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def insert(tree: PrefixTree, ids: str, *numbers: int, salt: bytes = b"") -> Node:
    """As a request does that holds what it finds, and then computes the rest; it keeps holding the end."""
    node, found = tree.acquire(pack(ids), salt)
    after = len(found)
    if after < len(numbers):
        own = blocks(*numbers[after:])
        node, _ = tree.extend(node, pack(ids[after * SIZE :]), own, salt)
        own[:] = -1  # a row of a table, which another request gets later
    return node


def make_tree() -> tuple[PrefixTree, list[Node]]:
    """Blocks 0 to 2 hold `aabbcc`, and 3 `dd` after `aabb`; what their requests hold."""
    tree = PrefixTree(SIZE)
    return tree, [insert(tree, "aabbcc", 0, 1, 2), insert(tree, "aabbdd", 0, 1, 3)]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ("", []),
        ("xx", []),
        ("aa", [0]),
        ("aabb", [0, 1]),
        ("aabbcc", [0, 1, 2]),
        ("aabbddee", [0, 1, 3]),
        ("aabbxx", [0, 1]),
        ("aabxcc", [0]),  # the second token of the second block differs
        ("abbbcc", []),  # the second token of the first block differs
        ("aabbcd", [0, 1]),
        ("bbcc", []),  # there, but not at the beginning
    ],
)
def test_the_longest_prefix_in_whole_blocks(ids: str, expected: list[int]) -> None:
    tree, _ = make_tree()
    assert_equal(tree.match(pack(ids))[2], len(expected), f"blocks that {ids!r} matches")
    assert_equal(tree.acquire(pack(ids))[1].tolist(), expected, f"blocks of {ids!r}", ("block",))


def test_a_match_may_end_inside_a_node() -> None:
    tree = PrefixTree(SIZE)
    node = insert(tree, "aabbccdd", 0, 1, 2, 3)
    found, count, num_blocks = tree.match(pack("aabbxx"))
    assert_equal((found is node, count, num_blocks), (True, 2, 2), "node, its blocks that match, all that match")
    assert_equal(tree.match(pack("aabbccdd"))[1:], (4, 4), "its blocks that match, all that match")


def test_a_salt_is_a_tree_of_its_own() -> None:
    tree = PrefixTree(SIZE)
    ends = [insert(tree, "aabb", 0, 1), insert(tree, "aabb", 2, 3, salt=b"x"), insert(tree, "aabb", 4, 5, salt=b"xx")]
    for salt, expected in ((b"", [0, 1]), (b"x", [2, 3]), (b"xx", [4, 5]), (b"y", [])):
        end, found = tree.acquire(pack("aabb"), salt)
        assert_equal(found.tolist(), expected, f"blocks with the salt {salt!r}", ("block",))
        ends.append(end)
    ends.append(insert(tree, "aacc", 2, 6, salt=b"x"))
    end, found = tree.acquire(pack("aabb"), b"x")
    assert_equal(found.tolist(), [2, 3], "blocks after a node that was divided", ("block",))
    assert_equal(tree.audit([*ends, end]), [], "audit", ("line",))


def test_a_match_goes_on_through_every_node() -> None:
    tree = PrefixTree(SIZE)
    insert(tree, "aabbccddee", 0, 1, 2, 3, 4)
    insert(tree, "aaxx", 0, 5)
    insert(tree, "aabbccyy", 0, 1, 2, 6)  # the nodes: aa, under it xx and bbcc, under that ddee and yy
    assert_equal(tree.match(pack("aabbccddee"))[1:], (2, 5), "blocks of the last node that match, all that match")
    assert_equal(tree.match(pack("aabbccddzz"))[1:], (1, 4), "blocks of the last node that match, all that match")
    found = tree.acquire(pack("aabbccddzz"))[1]
    assert_equal(found.tolist(), [0, 1, 2, 3], "blocks of 'aabbccddzz'", ("block",))


def test_a_growing_request_stays_one_node() -> None:
    tree = PrefixTree(SIZE)
    node = insert(tree, "aa", 0)
    end, of_tree = tree.extend(node, pack("bb"), blocks(1))
    assert_equal((end is node, of_tree.tolist()), (True, [1]), "the same node, and the new block")
    other = insert(tree, "aabb", 0, 1)
    assert_equal(other is node, True, "another request holds the same node")
    end, _ = tree.extend(node, pack("cc"), blocks(2))
    assert_equal(end is node, False, "a node that another request holds does not grow")
    assert_equal((other.blocks.tolist(), end.blocks.tolist()), ([0, 1], [2]), "blocks of the two nodes", ("node",))
    assert_equal(tree.audit([other, end]), [], "audit", ("line",))


def test_blocks_that_are_there_are_kept_and_the_request_s_own_come_back_unused() -> None:
    """Two requests compute the same three blocks, and the second continues with a fourth."""
    tree = PrefixTree(SIZE)
    first, _ = tree.acquire(pack("aabbccdd"))
    second, _ = tree.acquire(pack("aabbccdd"))
    first, of_tree = tree.extend(first, pack("aabbcc"), blocks(0, 1, 2))
    assert_equal(of_tree.tolist(), [0, 1, 2], "the first request's blocks are new", ("block",))
    second, of_tree = tree.extend(second, pack("aabbccdd"), blocks(7, 8, 9, 3))
    assert_equal(of_tree.tolist(), [0, 1, 2, 3], "the second finds three blocks and adds one", ("block",))
    assert_equal(tree.blocks().tolist(), [0, 1, 2, 3], "blocks of the tree", ("block",))
    assert_equal(tree.audit([first, second]), [], "audit", ("line",))


def test_a_node_of_another_request_is_split_and_not_lengthened() -> None:
    """A request that computed the beginning of another's node, and then something else."""
    tree = PrefixTree(SIZE)
    mine, _ = tree.acquire(pack("aabbee"))
    theirs = insert(tree, "aabbcc", 0, 1, 2)
    mine, of_tree = tree.extend(mine, pack("aabbee"), blocks(7, 8, 5))
    assert_equal(of_tree.tolist(), [0, 1, 5], "two blocks found and one added", ("block",))
    assert_equal(tree.acquire(pack("aabbcc"))[1].tolist(), [0, 1, 2], "the other request's path", ("block",))
    assert_equal(theirs.blocks.tolist(), [2], "the node that the other request holds is the lower part", ("block",))
    alone, _ = tree.acquire(pack("aabbff"))
    alone, of_tree = tree.extend(alone, pack("ff"), blocks(6))
    assert_equal(tree.acquire(pack("aabbff"))[1].tolist(), [0, 1, 6], "a third way on", ("block",))


def test_a_node_that_others_continue_or_hold_is_not_lengthened() -> None:
    tree = PrefixTree(SIZE)
    mine, other = insert(tree, "aabb", 0, 1), insert(tree, "aabbcc", 0, 1, 2)
    tree.release(other)  # its block remains, under the node that is mine alone now
    tree.extend(mine, pack("dd"), blocks(3))
    assert_equal(tree.acquire(pack("aabbcc"))[1].tolist(), [0, 1, 2], "blocks of 'aabbcc', cached before", ("block",))
    assert_equal(tree.acquire(pack("aabbdd"))[1].tolist(), [0, 1, 3], "blocks of 'aabbdd'", ("block",))
    tree = PrefixTree(SIZE)
    mine, _ = tree.acquire(pack("aabbcc"))
    theirs = insert(tree, "aabb", 0, 1)
    mine, of_tree = tree.extend(mine, pack("aabbcc"), blocks(7, 8, 2))
    assert_equal(of_tree.tolist(), [0, 1, 2], "two blocks found and one added", ("block",))
    assert_equal(theirs.blocks.tolist(), [0, 1], "blocks of the node that the other request holds", ("block",))
    assert_equal(tree.audit([mine, theirs]), [], "audit", ("line",))


def release_all(tree: PrefixTree, *ends: Node) -> None:
    for end in ends:
        tree.release(end)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda tree, c, d: setattr(d, "num_users", 2), r"\[3\] counts 2 users and has 1"),
        (lambda tree, c, d: tree.unused.update({d: None}), r"\[3\] has 1 users and is listed as unused"),
        (lambda tree, c, d: (release_all(tree, c, d), tree.unused.pop(d)), r"\[3\] has 0 users and is not listed"),
        (
            lambda tree, c, d: (release_all(tree, c, d), tree.unused.move_to_end(d)),
            "unused and listed before its child",
        ),
        (lambda tree, c, d: setattr(d, "tokens", d.tokens[:ID_BYTES]), r"\[3\] has 1 tokens"),
        (lambda tree, c, d: setattr(d, "name", c.name), r"\[0, 1\] has a child that is not under its name"),
        (lambda tree, c, d: setattr(tree, "num_blocks", 3), "counts 3 blocks, 0 of them unused, and has 4 and 0"),
        (
            lambda tree, c, d: setattr(tree, "num_unused_blocks", 1),
            "counts 4 blocks, 1 of them unused, and has 4 and 0",
        ),
    ],
)
def test_the_audit_finds_what_is_wrong(fault: Callable[[PrefixTree, Node, Node], Any], told: str) -> None:
    tree, (c, d) = make_tree()
    fault(tree, c, d)
    assert re.search(told, " ".join(tree.audit([c, d] if c.num_users else [])))


def test_a_release_reaches_the_first_node_of_the_path() -> None:
    tree, (c, d) = make_tree()
    f = insert(tree, "aaff", 0, 5)  # divides aabb: the path of d is dd, bb, aa
    tree.release(d)
    assert_equal(tree.audit([c, f]), [], "audit after a release, others holding a part of the path", ("line",))
    tree.release(c)
    tree.release(f)
    assert_equal(tree.num_unused_blocks, 5, "unused blocks when all are released")


def test_several_blocks_are_evicted_from_the_end_of_the_oldest_node() -> None:
    tree = PrefixTree(SIZE)
    for node in (insert(tree, "aabbcc", 0, 1, 2), insert(tree, "ee", 4)):
        tree.release(node)
    assert_equal(tree.evict(2).tolist(), [2, 1], "two evicted: of aabbcc, the last first", ("block",))
    assert_equal(tree.evict(2).tolist(), [0, 4], "two more: what is left of it, then ee", ("block",))


def test_what_is_not_held_is_evicted_from_the_ends_and_the_oldest_first() -> None:
    tree, (c, d) = make_tree()
    e = insert(tree, "ee", 4)
    assert_equal((tree.num_blocks, tree.num_unused_blocks), (5, 0), "blocks, and unused ones, while all are held")
    tree.release(d)
    assert_equal(tree.unused_blocks().tolist(), [3], "unused blocks: dd", ("block",))
    tree.release(e)
    tree.release(c)
    assert_equal(tree.num_unused_blocks, 5, "unused blocks")
    order = [int(tree.evict(1)[0]) for _ in range(5)]
    assert_equal(order, [3, 4, 2, 1, 0], "evicted: dd, ee, then aabbcc from its end", ("eviction",))
    assert_equal((tree.num_blocks, list(tree.root.children)), (0, []), "blocks and children of the root that are left")


def test_a_held_path_is_not_evicted_and_using_it_makes_it_recent() -> None:
    tree, (c, d) = make_tree()
    e = insert(tree, "ee", 4)
    for node in (c, d, e):
        tree.release(node)
    held, _ = tree.acquire(pack("aabbcc"))
    assert_equal(tree.num_unused_blocks, 2, "unused blocks: dd and ee")
    assert_equal(tree.evict(2).tolist(), [3, 4], "evicted while aabbcc is held", ("block",))
    tree.release(held)
    insert(tree, "ff", 5)
    assert_equal(tree.evict(2).tolist(), [2, 1], "evicted: a part of a node, from its end", ("block",))
    assert_equal(tree.match(pack("aabbcc"))[2], 1, "blocks that aabbcc still matches")
    assert_equal(tree.acquire(pack("aabbcc"))[1].tolist(), [0], "what is left of aabbcc", ("block",))


@dataclass
class Entry:
    """A prefix of the dictionary: the block that its last tokens are in."""

    block: int
    num_users: int
    last_used: int


class Tree(RuleBasedStateMachine):
    """A dictionary of all prefixes in whole blocks, beside the tree. Tokens are `a` and `b`."""

    @initialize(size=st.sampled_from([1, 2, 3]))
    def begin(self, size: int) -> None:
        self.size, self.tree = size, PrefixTree(size)
        self.prefixes: dict[tuple[str, str], Entry] = {}  # by salt and tokens
        self.users: list[tuple[Node, str, str]] = []  # node, salt, tokens
        self.num_made = self.clock = 0

    def path(self, salt: str, ids: str) -> list[tuple[str, str]]:
        """Its prefixes that the dictionary has, the shortest first."""
        path = []
        for end in range(self.size, len(ids) + 1, self.size):
            if (salt, ids[:end]) not in self.prefixes:
                break
            path.append((salt, ids[:end]))
        return path

    @rule(ids=st.text("ab", max_size=12), salt=st.sampled_from(["", "", "x"]))
    def acquire(self, ids: str, salt: str) -> None:
        ids = ids[: len(ids) // self.size * self.size]
        path = self.path(salt, ids)
        assert self.tree.match(pack(ids), salt.encode())[2] == len(path)
        node, found = self.tree.acquire(pack(ids), salt.encode())
        assert found.tolist() == [self.prefixes[prefix].block for prefix in path]
        for prefix in path:
            self.prefixes[prefix].num_users += 1
        self.users.append((node, salt, ids[: len(path) * self.size]))

    @precondition(lambda self: self.users)
    @rule(data=st.data(), more=st.text("ab", min_size=1, max_size=6))
    def extend(self, data: st.DataObject, more: str) -> None:
        number = data.draw(st.integers(0, len(self.users) - 1))
        node, salt, ids = self.users[number]
        more = more[: len(more) // self.size * self.size]
        if not more:
            return
        own = range(self.num_made, self.num_made + len(more) // self.size)
        self.num_made = own.stop
        node, of_tree = self.tree.extend(node, pack(more), blocks(*own), salt.encode())
        expected = []
        for mine, end in zip(own, range(self.size, len(more) + 1, self.size), strict=True):
            entry = self.prefixes.setdefault((salt, ids + more[:end]), Entry(mine, 0, 0))
            entry.num_users += 1
            expected.append(entry.block)
        assert of_tree.tolist() == expected
        self.users[number] = node, salt, ids + more

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        node, salt, ids = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.tree.release(node)
        self.clock += 1
        for prefix in self.path(salt, ids):
            self.prefixes[prefix].num_users -= 1
            self.prefixes[prefix].last_used = self.clock

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        count = min(count, self.tree.num_unused_blocks)
        if not count:
            return
        expected = []
        for _ in range(count):
            parents = {(salt, ids[: -self.size]) for salt, ids in self.prefixes}
            leaves = [p for p, entry in self.prefixes.items() if not entry.num_users and p not in parents]
            oldest = min(leaves, key=lambda prefix: self.prefixes[prefix].last_used)
            expected.append(self.prefixes.pop(oldest).block)
        assert self.tree.evict(count).tolist() == expected

    @invariant()
    def the_tree_is_as_the_dictionary(self) -> None:
        if not hasattr(self, "tree"):
            return
        entries = self.prefixes.values()
        assert sorted(self.tree.blocks().tolist()) == sorted(entry.block for entry in entries)
        assert sorted(self.tree.unused_blocks().tolist()) == sorted(e.block for e in entries if not e.num_users)
        assert self.tree.audit([node for node, *_ in self.users]) == []
        for node, salt, ids in self.users:
            alone = [prefix for prefix in self.path(salt, ids) if self.prefixes[prefix].num_users == 1]
            assert self.tree.num_alone(node) == len(alone)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40)
