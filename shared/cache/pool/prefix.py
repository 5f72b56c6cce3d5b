"""Computes common prefixes once: a paged pool's prefix tree. The host side. Introduced in phase 8.

An admitted request gets the blocks that already hold a prefix of its tokens, and is computed from there on. Blocks
are shared by reference count: one for each block table, and one for the tree (:mod:`shared.cache.pool.prefix_tree`),
which a full block enters when its tokens are committed. So a conversation's next turn finds its own previous answers,
and a preempted request finds most of its tokens. A released block stays in the tree until a block is needed.

Even a fully cached prompt still needs logits, so one of its tokens is computed. It is computed in a copy of the last
block, which is freed once the token is committed, since the tree already has that block.

While a running request computes a prefix, others that begin with the same prefix should wait for its blocks instead of
computing the same tokens: ``must_wait`` reports this to the scheduler.

Invariants: a block with more than one reference is never written; a request holds the tree node at the end of its
prefix, and the first blocks of its table are the tree's; free, cached and held blocks add up to all blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from shared.cache.layout.paged import PagedLayout, PagedSizes
from shared.cache.pool.blocks import Blocks
from shared.cache.pool.extension import BlockTables, NoExtension, PoolExtension
from shared.cache.pool.prefix_tree import ID_BYTES, Node, PrefixTree
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.errors import BlockError, CapacityError
from shared.models.config import ModelConfig
from shared.scheduling.schedule import Schedule


@dataclass
class Prefix:
    """A request's part of the tree: ``node`` is at the end of ``num_blocks`` blocks, the first ``num_shared`` of which
    are in the request's table. The remaining block, if any, is the source of a copy.
    """

    node: Node
    num_blocks: int
    num_shared: int
    computes: tuple[Node, bytes] | None = None  # the block after the node, if it has yet to be computed


def all_tokens(request: Request) -> int:
    """Every known token of a request may be found in the tree."""
    return request.num_tokens


class PrefixSharing(PoolExtension):
    """A prefix tree; see :class:`shared.cache.pool.extension.PoolExtension`.

    Args:
        num_shareable: the tokens of a request, from the first, that it may find in the tree.
    """

    def __init__(self, block_size: int, num_shareable: Callable[[Request], int] = all_tokens) -> None:
        self.block_size, self.num_shareable = block_size, num_shareable
        self.tree = PrefixTree(block_size)
        self.prefixes: dict[Request, Prefix] = {}  # of the admitted requests
        self.copying: set[Request] = set()  # those whose next step copies a block
        self.computing: dict[tuple[Node, bytes], Request] = {}  # the request that computes the block after a node
        self.leaders: WeakKeyDictionary[Request, tuple[Request, int]] = WeakKeyDictionary()
        self.packed_ids: WeakKeyDictionary[Request, bytes] = WeakKeyDictionary()

    def admit(self, pool: BlockTables, request: Request) -> int:
        """The request shares the blocks of its longest cached prefix."""
        tokens, salt = self.shareable(request), _salt(request)
        node, blocks = self.tree.acquire(b"" if request.needs_prompt_logits else tokens, salt)
        # exercise 08x5: share the blocks, and leave a token to compute
        # hint: `blocks` hold the first len(blocks) * block_size tokens; at least one token must remain to be computed
        # hint: if none remains, the last block is not shared but copied, and all tokens but one are cached
        # hint: the copy takes a block more than the request needs, and its next token may take another: if fewer than
        # hint: two blocks can be had (free_tokens), release the node, acquire all blocks but the last, and do not copy
        # hint: put the shared blocks into the request's table: take a row, count a reference for each (allocator.share)
        num_cached = min(len(blocks) * self.block_size, request.num_tokens - 1)
        if num_cached < len(blocks) * self.block_size and pool.free_tokens < 2 * self.block_size:
            self.tree.release(node)
            node, blocks = self.tree.acquire(tokens[: -self.tree.block_bytes], salt)
            num_cached = len(blocks) * self.block_size
        num_shared = num_cached // self.block_size
        if num_cached and pool.free_rows:
            row = pool.rows[request] = pool.free_rows.pop()
            pool.allocator.share(blocks[:num_shared])
            pool.tables[row, :num_shared] = blocks[:num_shared]
            pool.num_held[row], pool.granted[row] = num_shared, num_shared * self.block_size
            pool.lengths[row] = num_cached
        # end exercise
        self.prefixes[request] = Prefix(node, len(blocks), num_shared)
        if num_shared < len(blocks):
            self.copying.add(request)
        self._note_computing(request)
        return num_cached

    def must_wait(self, request: Request) -> bool:
        if request.needs_prompt_logits:
            return False
        leader, num_common = self.leaders.get(request, (None, 0))
        if leader in self.prefixes and self.prefixes[leader].num_blocks < num_common:
            return True  # found without comparing the tokens again
        tokens, salt = self.shareable(request), _salt(request)
        node, count, num_blocks = self.tree.match(tokens, salt)
        start = num_blocks * self.tree.block_bytes
        if start == len(tokens) or count < len(node.blocks):
            return False  # everything is cached, or the rest differs from what is computed after the node
        leader = self.computing.get((node, self.tree.child_name(node, tokens, start, salt)))
        if leader is None:
            return False
        self.leaders[request] = leader, self.tree.num_common(self._tokens(leader), tokens)
        return True

    def allocate(self, pool: BlockTables, count: int) -> Blocks | None:
        """Evicts cached blocks if too few are free."""
        missing = count - pool.allocator.num_free
        if not 0 < missing <= self.tree.num_unused_blocks:
            return pool.allocator.allocate(count)
        evicted = self.tree.evict(missing)  # the tree's reference becomes the table's
        if missing == count:
            return evicted
        free = pool.allocator.allocate(count - missing)
        assert free is not None
        return np.concatenate([free, evicted])

    def commit(self, pool: BlockTables, request: Request, num_tokens: int) -> None:
        """Blocks that are now full enter the tree."""
        row, prefix = pool.rows[request], self.prefixes.get(request)
        if prefix is None or pool.lengths[row] % self.block_size >= num_tokens:
            return  # either they are not for the tree, or no block was filled
        num_full = pool.lengths[row] // self.block_size
        own = pool.tables[row, prefix.num_shared : num_full]
        num_copied = prefix.num_blocks - prefix.num_shared
        of_tree = prefix.node.blocks[len(prefix.node.blocks) - num_copied :]
        if num_full > prefix.num_blocks:
            start, end = prefix.num_blocks * self.tree.block_bytes, num_full * self.tree.block_bytes
            tokens = self._tokens(request)[start:end]
            prefix.node, found = self.tree.extend(prefix.node, tokens, own[num_copied:], _salt(request))
            of_tree = np.concatenate([of_tree, found]) if num_copied else found
        pool.allocator.share(of_tree)  # a reference for the tree if the block is new there, otherwise for this table
        if own.tolist() != of_tree.tolist():
            pool.allocator.free(own[own != of_tree])
            pool.tables[row, prefix.num_shared : num_full] = of_tree
        prefix.num_blocks = prefix.num_shared = num_full
        self.copying.discard(request)
        self._note_computing(request)

    def check_truncation(self, request: Request, num_tokens: int) -> None:
        """Tokens that are in the tree may be read by other requests."""
        num_shared = self.prefixes[request].num_shared if request in self.prefixes else 0
        if num_tokens < num_shared * self.block_size:
            raise CapacityError(
                f"Request {request.request_id} cannot be truncated to {num_tokens} tokens: its first "
                f"{num_shared * self.block_size} are committed to the prefix tree."
            )

    def release(self, request: Request) -> None:
        """The request's full blocks stay cached."""
        prefix = self.prefixes.pop(request, None)
        if prefix is not None:
            self.tree.release(prefix.node)
            self._forget_computing(request, prefix)
            self.copying.discard(request)

    def lay_out(self, pool: BlockTables, schedule: Schedule, layout: PagedLayout) -> PagedLayout:
        """Raises BlockError if the step would write a shared block."""
        written = layout.slot_mapping // self.block_size
        is_shared = pool.allocator.ref_counts[written] > 1
        if is_shared.any():
            block = written[is_shared][0]
            raise BlockError(f"The step would write block {block}, which is shared; only a copy may be written.")
        if not self.copying:
            return layout
        copies = [self._copy(pool, request) for request in schedule.requests if request in self.copying]
        return replace(layout, copies=np.array(copies, np.int32)) if copies else layout

    def num_unused_blocks(self) -> int:
        return self.tree.num_unused_blocks

    def used_tokens(self) -> int:
        """A token of a shared block counts once."""
        num_shared = sum([prefix.num_shared for prefix in self.prefixes.values()])
        return (self.tree.num_blocks - self.tree.num_unused_blocks - num_shared) * self.block_size

    def unused_blocks(self) -> list[int]:
        return self.tree.unused_blocks().tolist()

    def drop_unused(self, pool: BlockTables) -> None:
        """The next allocation gets the blocks of a path in their order."""
        pool.allocator.free(self.tree.evict(self.tree.num_unused_blocks)[::-1])

    def audit(self, pool: BlockTables) -> list[str]:
        return self.tree.audit([prefix.node for prefix in self.prefixes.values()])

    def block_lists(self) -> list[Blocks]:
        return [self.tree.blocks()]

    def _copy(self, pool: BlockTables, request: Request) -> tuple[int, int]:
        """The block that a request's next step copies, and where to."""
        prefix = self.prefixes[request]
        return int(prefix.node.blocks[-1]), int(pool.tables[pool.rows[request], prefix.num_shared])

    def _note_computing(self, request: Request) -> None:
        """Update ``computing`` with the end of the request's prefix."""
        prefix = self.prefixes[request]
        self._forget_computing(request, prefix)
        if prefix.num_blocks < request.num_tokens // self.block_size:
            tokens, start = self._tokens(request), prefix.num_blocks * self.tree.block_bytes
            prefix.computes = prefix.node, self.tree.child_name(prefix.node, tokens, start, _salt(request))
            self.computing.setdefault(prefix.computes, request)

    def _forget_computing(self, request: Request, prefix: Prefix) -> None:
        if prefix.computes is not None and self.computing.get(prefix.computes) is request:
            del self.computing[prefix.computes]
        prefix.computes = None

    def shareable(self, request: Request) -> bytes:
        """The packed ids of the blocks that a request may find in the tree."""
        return self._tokens(request)[: self.num_shareable(request) // self.block_size * self.tree.block_bytes]

    def _tokens(self, request: Request) -> bytes:
        """The packed ids of the whole blocks that a request's known tokens fill."""
        num_tokens = request.num_tokens // self.block_size * self.block_size
        packed = self.packed_ids.get(request, b"")
        if len(packed) != num_tokens * ID_BYTES:
            added = request.packed_ids(len(packed) // ID_BYTES, num_tokens)
            packed += np.frombuffer(added, np.int64).astype(np.int32).tobytes()
            self.packed_ids[request] = packed
        return packed


def _salt(request: Request) -> bytes:
    return (request.params.cache_salt or "").encode("utf-8", "surrogatepass")


def prefix_sharing(config: EngineConfig, shape: ModelConfig, sizes: PagedSizes) -> PoolExtension:
    """See :data:`shared.cache.paged_memory.MakeExtension`; without prefix caching, each block has one request."""
    return PrefixSharing(sizes.block_size) if config.is_on("use_prefix_caching") else NoExtension()
