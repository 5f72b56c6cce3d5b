"""A radix tree of token prefixes whose keys and values are in KV cache blocks. Introduced in phase 8.

Requests that begin with the same tokens need the same keys and values, so they can read the same blocks. The tree maps
token ids to blocks (RadixAttention: Zheng et al., NeurIPS 2024, arXiv 2312.07104). A node represents a run of whole
blocks. The path from the root to the node spells the tokens of its blocks, after those of all blocks on the path before
them.
Edges store and compare the token ids themselves: a hash could collide, and one prompt would be computed with the keys
of another.

A request holds a node while it runs, and with it all nodes of the path. The blocks of nodes that no request holds are
cached: they stay until a block is needed, and are evicted least recently used first, each path from its end.

Token ids are passed packed, 4 bytes each, and in whole blocks: comparing two runs is then one comparison of memory. A
salt is a part of the first edge of a path, so prefixes with different salts share nothing.

Invariants: no two children of a node begin with the same block; every held node has a held parent; ``unused`` lists a
node before its ancestors, so its first node is a leaf. The tree counts no references to blocks.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from shared.cache.pool.blocks import Blocks

ID_BYTES = 4
"""Bytes of a packed token id."""


class Node:
    """A run of blocks below ``parent``, and the packed ids of their tokens; only the root has no parent and no blocks.

    ``num_users`` requests hold the node or one of its descendants. ``name`` is its key in the parent's ``children``.
    """

    __slots__ = ("blocks", "children", "name", "num_users", "parent", "tokens")

    def __init__(self, parent: "Node | None", name: bytes, tokens: bytes, blocks: Blocks, num_users: int) -> None:
        self.parent, self.name, self.tokens, self.blocks, self.num_users = parent, name, tokens, blocks, num_users
        self.children: dict[bytes, Node] = {}


class PrefixTree:
    """Prefixes in blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_bytes = block_size * ID_BYTES
        self.root = Node(None, b"", b"", np.zeros(0, np.int32), 0)
        self.unused: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.num_blocks = 0
        self.num_unused_blocks = 0  # of the nodes in `unused`

    def match(self, tokens: bytes, salt: bytes = b"") -> tuple[Node, int, int]:
        """Find the longest prefix of ``tokens`` in the tree.

        Returns:
            The last node that the prefix reaches, how many of that node's blocks it covers, and all of its blocks.
        """
        # exercise 08x1: walk down the tree
        # hint: node.children.get(self.child_name(node, tokens, start, salt)) is the child for the block at `start`
        # hint: the whole child matches if tokens.startswith(child.tokens, start): go on after it
        # hint: else the prefix ends inside the child, whose first block matches; num_common counts its blocks that do
        # hint: `start` counts bytes; a block has self.block_bytes
        node, start = self.root, 0
        while start < len(tokens):
            child = node.children.get(self.child_name(node, tokens, start, salt))
            if child is None:
                break
            if not tokens.startswith(child.tokens, start):
                count = self.num_common(child.tokens, tokens[start:])
                return child, count, start // self.block_bytes + count
            node, start = child, start + len(child.tokens)
        # end exercise
        return node, len(node.blocks), start // self.block_bytes

    def child_name(self, node: Node, tokens: bytes, start: int = 0, salt: bytes = b"") -> bytes:
        """The key in ``node.children`` of the child that begins with the block at byte ``start`` of ``tokens``."""
        first = tokens[start : start + self.block_bytes]
        return first if node.parent is not None else salt + first

    def acquire(self, tokens: bytes, salt: bytes = b"") -> tuple[Node, Blocks]:
        """Hold the longest prefix of ``tokens`` in the tree; returns the node at its end, and all of its blocks."""
        node, count, _ = self.match(tokens, salt)
        if count < len(node.blocks):
            node = self._split(node, count)
        self._hold(node)
        blocks = [ancestor.blocks for ancestor in _path(node)]
        return node, np.concatenate(blocks[::-1]) if blocks else self.root.blocks

    def extend(self, node: Node, tokens: bytes, blocks: Blocks, salt: bytes = b"") -> tuple[Node, Blocks]:
        """Insert the blocks that a request has computed after the node that it holds, and hold their end instead.

        Args:
            tokens: the packed ids of ``blocks``.

        Returns:
            The new end, and the tree's blocks for these tokens, which differ where another request was faster.
        """
        # exercise 08x2: insert what is new, and find what is there
        # hint: while tokens are left, look for the child of `node` with their first block, as match does
        # hint: if there is none, what is left is new: self._append(node, rest, blocks, salt) returns the new end, but
        # hint: if `node` is the held one, has no children and no other user, self._lengthen(node, rest, blocks) will do
        # hint: if there is one, count its common blocks (num_common), and _split it where it covers more than these;
        # hint: go on after them with the rest of tokens and blocks, and collect the child's blocks
        # hint: hold the end (_hold) before letting go of the old node (release)
        start, held, found = 0, node, [self.root.blocks]
        while start < len(blocks):
            rest = tokens[start * self.block_bytes :]
            child = node.children.get(self.child_name(node, rest, salt=salt))
            if child is None:
                found.append(blocks[start:])
                if node is held and node.num_users == 1 and not node.children:  # not the root, which has no count
                    self._lengthen(node, rest, blocks[start:])
                else:
                    node = self._append(node, rest, blocks[start:], salt)
                break
            count = self.num_common(child.tokens, rest)
            node = child if count == len(child.blocks) else self._split(child, count)
            found.append(node.blocks)
            start += count
        if node is not held:
            self._hold(node)
            self.release(held)
        # end exercise
        return node, found[1] if len(found) == 2 else np.concatenate(found)  # usually a single block of a single node

    def release(self, node: Node) -> None:
        """Release a node and its path; from now on, the blocks of nodes that no other request holds count as cached."""
        # exercise 08x3: release a path
        # hint: _path yields the node and its ancestors, without the root; one user fewer for each
        # hint: a node without users goes to the end of `unused`, and its blocks count in num_unused_blocks
        # hint: a node must precede its ancestors in `unused`: which order does _path have?
        for ancestor in _path(node):
            ancestor.num_users -= 1
            if ancestor.num_users == 0:
                self.unused[ancestor] = None
                self.num_unused_blocks += len(ancestor.blocks)
        # end exercise

    def num_alone(self, node: Node) -> int:
        """The blocks of a held node's path that no other request holds."""
        return sum(len(ancestor.blocks) for ancestor in _path(node) if ancestor.num_users == 1)

    def evict(self, count: int) -> Blocks:
        """Remove ``count`` blocks that no request holds, least recently used first; there must be at least that many.

        Returns the blocks in the order in which ``count`` calls would evict one each.
        """
        assert count <= self.num_unused_blocks, f"{count} blocks of {self.num_unused_blocks} unused ones"
        evicted: list[Blocks] = []
        self.num_blocks -= count
        self.num_unused_blocks -= count
        # exercise 08x4: evict the least recently used blocks
        # hint: the first node of `unused` is a leaf; take blocks from its end, as many as are still to be evicted, the
        # hint: last one first
        # hint: a node that keeps some blocks keeps their tokens: self.block_bytes for each
        # hint: a node without blocks is removed from `unused` and from its parent's children
        while count:
            leaf = next(iter(self.unused))
            evicted.append(leaf.blocks[: -count - 1 : -1])
            count -= len(evicted[-1])
            leaf.blocks = leaf.blocks[: -len(evicted[-1])]
            leaf.tokens = leaf.tokens[: len(leaf.blocks) * self.block_bytes]
            if not len(leaf.blocks):
                del self.unused[leaf]
                assert leaf.parent is not None
                del leaf.parent.children[leaf.name]
        # end exercise
        return evicted[0] if len(evicted) == 1 else np.concatenate([self.root.blocks, *evicted])

    def num_common(self, tokens: bytes, other: bytes) -> int:
        """The number of leading blocks that two packed runs have in common."""
        size = min(len(tokens), len(other)) // ID_BYTES
        differs = np.frombuffer(tokens, np.int32, size) != np.frombuffer(other, np.int32, size)
        num_tokens = int(differs.argmax()) if differs.any() else size
        return num_tokens * ID_BYTES // self.block_bytes

    def _nodes(self) -> Iterator[Node]:
        """All nodes, the root included."""
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def blocks(self) -> Blocks:
        """All blocks of the tree."""
        return np.concatenate([node.blocks for node in self._nodes()])

    def unused_blocks(self) -> Blocks:
        """The blocks of nodes that no request holds."""
        return np.concatenate([self.root.blocks, *(node.blocks for node in self.unused)])

    def audit(self, held: list[Node]) -> list[str]:
        """Check the invariants; returns one message per violation.

        Args:
            held: the node that each request holds.
        """
        num_users = dict.fromkeys(self._nodes(), 0)
        for node in held:
            for ancestor in _path(node):
                num_users[ancestor] += 1
        found, order = [], {node: number for number, node in enumerate(self.unused)}
        for node, count in num_users.items():
            what = f"The node with blocks {node.blocks.tolist()}"
            if node.num_users != count and node.parent is not None:
                found.append(f"{what} counts {node.num_users} users and has {count}.")
            if (node in order) != (count == 0 and node.parent is not None):
                found.append(f"{what} has {count} users and is {'' if node in order else 'not '}listed as unused.")
            if len(node.tokens) != len(node.blocks) * self.block_bytes:
                found.append(f"{what} has {len(node.tokens) // ID_BYTES} tokens.")
            for name, child in node.children.items():
                begins = name.endswith(child.tokens[: self.block_bytes])
                if child.name != name or child.parent is not node or not begins:
                    found.append(f"{what} has a child that is not under its name.")
                if node in order and order.get(child, len(order)) > order[node]:
                    found.append(f"{what} is unused and listed before its child.")
        num_blocks, num_unused = len(self.blocks()), len(self.unused_blocks())
        if (self.num_blocks, self.num_unused_blocks) != (num_blocks, num_unused):
            counted = f"{self.num_blocks} blocks, {self.num_unused_blocks} of them unused"
            found.append(f"The tree counts {counted}, and has {num_blocks} and {num_unused}.")
        return found

    def _hold(self, node: Node) -> None:
        for ancestor in _path(node):
            if ancestor.num_users == 0:
                del self.unused[ancestor]
                self.num_unused_blocks -= len(ancestor.blocks)
            ancestor.num_users += 1

    def _lengthen(self, node: Node, tokens: bytes, blocks: Blocks) -> None:
        """Add new blocks to a leaf that one request holds, so that a growing request stays one node."""
        node.tokens += tokens
        node.blocks = np.concatenate([node.blocks, blocks])
        self.num_blocks += len(blocks)

    def _append(self, node: Node, tokens: bytes, blocks: Blocks, salt: bytes) -> Node:
        """Add new blocks below a node; returns their node, which must be held next."""
        child = Node(node, self.child_name(node, tokens, salt=salt), tokens, blocks.copy(), 0)
        node.children[child.name] = child
        self.unused[child] = None
        self.num_blocks += len(blocks)
        self.num_unused_blocks += len(blocks)
        return child

    def _split(self, node: Node, count: int) -> Node:
        """Divide a node after ``count`` of its blocks; returns the upper part, which is new and must be held next."""
        assert node.parent is not None
        size = count * self.block_bytes
        upper = Node(node.parent, node.name, node.tokens[:size], node.blocks[:count], node.num_users)
        node.parent.children[node.name] = upper
        node.parent, node.tokens, node.blocks = upper, node.tokens[size:], node.blocks[count:]
        node.name = self.child_name(upper, node.tokens)
        upper.children[node.name] = node
        if upper.num_users == 0:
            self.unused[upper] = None
        return upper


def _path(node: Node) -> Iterator[Node]:
    """The node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
